// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"instar/internal/debian"
	"instar/internal/vmtest"
)

func TestTimeoutFor(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want time.Duration
	}{
		{nil, vmtest.DefaultTimeout},
		{[]string{"-test.v", "-test.timeout=30m0s"}, 31 * time.Minute},
		{[]string{"--test.timeout=5s"}, 65 * time.Second},
		{[]string{"-test.timeout=0"}, vmtest.DefaultTimeout},
		{[]string{"-test.timeout=soon"}, vmtest.DefaultTimeout},
	} {
		if got := timeoutFor(tc.args); got != tc.want {
			t.Errorf("%q: %v, want %v", tc.args, got, tc.want)
		}
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("VMTEST_A", "a b")
	got := environment([]string{"PATH=/bin", "INSTAR_X=1", "HOME=/"}, []string{"VMTEST_A", "B=2"})
	if want := []string{"INSTAR_X=1", "VMTEST_A=a b", "B=2"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestFolderFor(t *testing.T) {
	module := t.TempDir()
	inside := filepath.Join(module, "a", "b")
	if err := os.MkdirAll(inside, 0o755); err != nil {
		t.Fatal(err)
	}
	for here, want := range map[string]string{inside: "/src/a/b", module: "/src", t.TempDir(): "/"} {
		t.Chdir(here)
		if got, err := folderFor(module); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", here, got, err, want)
		}
	}
}

// What is wrong with a call is told apart from what a program returns.
func TestRunErrors(t *testing.T) {
	t.Setenv(debian.StoreEnv, t.TempDir())
	program := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(program, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args []string
		code int
		says string
	}{
		{nil, exitUsage, "usage: scripts/vmtest"},
		{[]string{"6.1"}, exitUsage, "usage: scripts/vmtest"},
		{[]string{"--what"}, exitUsage, "-what"},
		{[]string{"--help"}, 0, "usage: scripts/vmtest"},
		{[]string{"6.1", program}, exitMachine, "start scripts/vmtest"},
		{[]string{"--built", "B", "--module-root", ".", "6.1", "/does/not/exist"}, exitMachine, "no such file"},
		{[]string{"--built", "B", "--module-root", ".", "6.1", "/"}, exitMachine, "is no program"},
		{[]string{"--built", "B", "--module-root", ".", "--file", "x", "6.1", program}, exitMachine, "want FROM:TO"},
		{[]string{"--built", "B", "--module-root", ".", "six", program}, exitMachine, `find kernel "six"`},
	} {
		built := t.TempDir()
		args := slices.Clone(tc.args)
		if i := slices.Index(args, "B"); i >= 0 {
			args[i] = built
		}
		var out strings.Builder
		if code := run(t.Context(), args, &out, &out); code != tc.code || !strings.Contains(out.String(), tc.says) {
			t.Errorf("%q: exit code %d, want %d; it says %q, want %q", tc.args, code, tc.code, out.String(), tc.says)
		}
		if _, err := os.Stat(built); slices.Contains(args, built) && err == nil {
			t.Errorf("%q: the folder of the program is still there", tc.args)
		}
	}
}
