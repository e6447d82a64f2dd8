// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"instar/internal/testutil"
)

// A descriptor that came with the process, and is nobody's here, is noted and left
// alone, by the successor too if that one has it as well.
func TestStrayDescriptors(t *testing.T) {
	s := newService(t, appConfig{})
	folder := t.TempDir()
	var paths []string
	for fd := 3; fd <= 4; fd++ {
		path := filepath.Join(folder, fmt.Sprint(fd))
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		s.files, paths = append(s.files, f), append(paths, path)
	}
	check := func(e appEvent, fd int, noted bool) {
		t.Helper()
		path, found := paths[fd-3], false
		for line := range strings.Lines(s.logs()) {
			found = found || strings.Contains(line, "ignored a descriptor") && strings.Contains(line, fmt.Sprintf("generation=%d ", e.Generation)) &&
				strings.Contains(line, fmt.Sprintf("fd=%d file=%s\n", fd, path))
		}
		target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", e.PID, fd))
		if has := target == path; found != noted || has != noted {
			t.Errorf("generation %d: descriptor %d is noted: %t, open: %t, want %t", e.Generation, fd, found, has, noted)
		}
	}
	first := s.up()
	check(first, 3, true)
	check(first, 4, true)
	if pid := s.one(); pid != first.PID {
		t.Errorf("process %d serves, not %d", pid, first.PID)
	}
	if _, err := s.upgrade(); err != nil {
		t.Fatal(err)
	}
	second := s.upgraded(2)
	check(second, 3, false) // its connection has this number
	check(second, 4, true)
}

// Two processes that are started at the same moment: one is the first, and the
// other takes over from it. Both want the same port, so that a second server beside
// the first would fail.
func TestTwoFirstProcesses(t *testing.T) {
	for range testutil.UnlessShort(5, 1) {
		s := newService(t, appConfig{})
		s.start()
		s.start()
		for n := 1; n <= 2; n++ {
			s.await(0, fmt.Sprintf("generation %d", n), func(e appEvent) bool {
				if e.What == "end" && e.Detail != "" {
					t.Fatalf("process %d ended: %s", e.PID, e.Detail)
				}
				return e.What == "ready" && e.Generation == n
			})
		}
		second := s.upgraded(2)
		if pid := s.one(); pid != second.PID {
			t.Errorf("process %d serves, not %d", pid, second.PID)
		}
		s.await(0, "the end of the first", func(e appEvent) bool { return e.What == "end" && e.PID != second.PID })
	}
}
