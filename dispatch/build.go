// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"fmt"
	"os"
	"runtime/debug"
	"sync"
)

// defaultBuild tells one build of the executable from the next: the VCS
// revision when the build recorded one of a clean tree, else size and
// modification time.
var defaultBuild = sync.OnceValue(func() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		var revision, modified string
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				revision = s.Value
			case "vcs.modified":
				modified = s.Value
			}
		}
		if len(revision) >= 12 && modified == "false" {
			return revision[:12]
		}
	}
	if st, err := os.Stat("/proc/self/exe"); err == nil {
		return fmt.Sprintf("%x-%x", st.Size(), st.ModTime().Unix())
	}
	return "unknown"
})
