// SPDX-License-Identifier: Apache-2.0

// Package build names the build of the running executable.
package build

import (
	"fmt"
	"os"
	"runtime/debug"
	"sync"
)

// ID is the first twelve digits of the VCS revision, or, when none was stamped,
// size and modification time of the executable.
func ID() string { return once() }

var once = sync.OnceValue(read)

func read() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value[:min(12, len(s.Value))]
			}
		}
	}
	// The path would show whatever lies there by now.
	if info, err := os.Stat("/proc/self/exe"); err == nil {
		return fmt.Sprintf("%d-%s", info.Size(), info.ModTime().UTC().Format("20060102T150405.000"))
	}
	return "unknown"
}
