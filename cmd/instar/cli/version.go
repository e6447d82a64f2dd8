// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// buildJSON says what this command is made of.
type buildJSON struct {
	Version int    `json:"version"`
	Module  string `json:"module"`
	// Release is the module's version, "(devel)" for a build from a checkout.
	Release  string `json:"release"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func newBuildJSON() buildJSON {
	b := buildJSON{Version: jsonVersion, Module: "instar", Release: "(devel)", Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if info.Main.Version != "" {
		b.Release = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

// text is the build in one line for people.
func (b buildJSON) text() string {
	release := b.Release
	if b.Revision != "" {
		release += " (" + b.Revision[:min(12, len(b.Revision))]
		if b.Modified {
			release += ", modified"
		}
		release += ")"
	}
	return fmt.Sprintf("instar %s %s %s", release, b.Go, b.Platform)
}

func (a *app) versionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this command",
		Args:  args(),
		RunE: func(*cobra.Command, []string) error {
			b := newBuildJSON()
			if a.json {
				return a.printJSON(b)
			}
			a.printf("%s", b.text())
			return nil
		},
	}
	a.jsonFlag(cmd)
	return cmd
}
