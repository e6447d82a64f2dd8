// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"instar/internal/testutil"
)

// copyTo puts a copy of the test binary at path; extra makes it another build.
func copyTo(t testing.TB, path, extra string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(self)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(path+".new", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if _, err := out.WriteString(extra); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// logs is what the processes of a service wrote.
func (s *service) logs() string {
	s.t.Helper()
	files, err := filepath.Glob(filepath.Join(s.config.Dir, "log*"))
	if err != nil {
		s.t.Fatal(err)
	}
	var all strings.Builder
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			s.t.Fatal(err)
		}
		all.Write(text)
	}
	return all.String()
}

// A new executable is started that is put in place by rename or by changing a
// symbolic link, and both builds are in the log. One that is not there, or is
// none, is an error that says so (F6).
func TestExecutableReplaced(t *testing.T) {
	testutil.Slow(t)
	s := newService(t, appConfig{Build: "-"}) // the default: by the file
	folder := t.TempDir()
	link := filepath.Join(folder, "server")
	builds := []string{filepath.Join(folder, "one"), filepath.Join(folder, "two")}
	copyTo(t, builds[0], "1")
	if err := os.Symlink(builds[0], link); err != nil {
		t.Fatal(err)
	}
	s.path = link
	s.up()
	pid := s.one()
	build := func() string {
		status, err := s.status()
		if err != nil {
			t.Fatal(err)
		}
		return status.Build
	}
	last := build()
	newer := func(how string) {
		t.Helper()
		if _, err := s.upgrade(); err != nil {
			t.Fatalf("%s: %v", how, err)
		}
		now := s.one()
		if now == pid {
			t.Fatalf("%s: process %d still serves", how, pid)
		}
		b := build()
		if b == last {
			t.Errorf("%s: build %s still serves", how, b)
		}
		found := false
		for line := range strings.Lines(s.logs()) {
			found = found || strings.Contains(line, "msg=superseded") && strings.Contains(line, "build="+last) && strings.Contains(line, "successor_build="+b)
		}
		if !found {
			t.Errorf("%s: no line of the log has both builds, %s and %s", how, last, b)
		}
		pid, last = now, b
	}
	copyTo(t, builds[1], "22")
	if err := errors.Join(os.Symlink(builds[1], link+".new"), os.Rename(link+".new", link)); err != nil {
		t.Fatal(err)
	}
	newer("symbolic link")
	copyTo(t, builds[1], "333")
	newer("rename")

	refused := func(how string, words ...string) {
		t.Helper()
		_, err := s.upgrade()
		if err == nil {
			t.Fatalf("%s: upgraded", how)
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q is not in %q", how, w, err)
			}
		}
		if now := s.one(); now != pid {
			t.Errorf("%s: process %d serves, not %d", how, now, pid)
		}
	}
	if err := os.Remove(builds[1]); err != nil {
		t.Fatal(err)
	}
	refused("deleted", "is not there any more", "this process has build "+last)
	if err := os.Mkdir(builds[1], 0o755); err != nil {
		t.Fatal(err)
	}
	refused("folder", "is not executable")
	if err := errors.Join(os.Remove(builds[1]), os.WriteFile(builds[1], []byte("#!/bin/sh\nexit 9\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	refused("no rights", "is not executable")
	if err := os.Chmod(builds[1], 0o755); err != nil {
		t.Fatal(err)
	}
	refused("another program", "exit status 9")
	copyTo(t, builds[1], "4444")
	writing, err := os.OpenFile(builds[1], os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	refused("being written", "text file busy", "by rename")
	if err := writing.Close(); err != nil {
		t.Fatal(err)
	}
	newer("complete at last")
}

// A child that the server starts holds none of its descriptors (F2).
func TestChildrenInheritNothing(t *testing.T) {
	s := newService(t, appConfig{Child: true})
	check := func(server appEvent) {
		t.Helper()
		child := s.await(0, "a child", func(e appEvent) bool { return e.What == "child" && e.PID == server.PID })
		pid, err := strconv.Atoi(child.Detail)
		if err != nil {
			t.Fatal(err)
		}
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, f.Name())); strings.HasPrefix(target, "socket:") {
				t.Errorf("the child of generation %d has descriptor %s, %s", server.Generation, f.Name(), target)
			}
		}
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil || strings.Contains(string(env), envFD) {
			t.Errorf("the child's environment: %q, %v", env, err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	check(s.up())
	for n := 2; n <= 3; n++ {
		if _, err := s.upgrade(); err != nil {
			t.Fatal(err)
		}
		check(s.await(0, "a generation", func(e appEvent) bool { return e.What == "ready" && e.Generation == n }))
	}
}
