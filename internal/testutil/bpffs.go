// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/capset"
)

// BPFFS mounts a bpffs in a folder of its own, which every user may enter, and
// returns the folder. It is unmounted when the test ends; a test that still
// uses it then fails.
//
// The test is skipped when it lacks the privilege.
func BPFFS(t testing.TB) string {
	t.Helper()
	Need(t, capset.SysAdmin)
	dir := t.TempDir()
	// t.TempDir makes the folder above for the test's user only.
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpffs", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755"); err != nil {
		t.Fatalf("mount bpffs: %v", err)
	}
	t.Cleanup(func() {
		if err := unmount(dir, 5*time.Second); err != nil {
			t.Errorf("unmount bpffs: %v", err)
		}
	})
	return dir
}

// unmount takes a moment where another goroutine just forked: until it
// executes, the child holds all descriptors of the process.
func unmount(dir string, patience time.Duration) error {
	deadline := time.Now().Add(patience)
	for {
		err := unix.Unmount(dir, 0)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			if err != nil {
				// Nothing stays mounted, whatever is wrong.
				err = errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH))
			}
			return err
		}
		time.Sleep(time.Millisecond)
	}
}
