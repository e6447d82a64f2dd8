// SPDX-License-Identifier: Apache-2.0

package summary

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// module is a module whose tests end in each way there is.
var module = map[string]string{
	"go.mod": "module example\n\ngo 1.26\n",
	"good/good_test.go": `package good

import "testing"

func TestPass(t *testing.T) {}
func TestSubs(t *testing.T) {
	t.Run("a", func(t *testing.T) {})
	t.Run("b/c", func(t *testing.T) { t.Skip("not today") })
}
func TestSkipped(t *testing.T) { t.Skip("needs CAP_BPF: run as root") }
func TestQuiet(t *testing.T) { t.SkipNow() }
`,
	"bad/bad_test.go": `package bad

import "testing"

func TestFail(t *testing.T) { t.Error("this is wrong") }
func TestSubs(t *testing.T) {
	t.Run("fails", func(t *testing.T) { t.Error("inside") })
	t.Run("passes", func(t *testing.T) {})
}
func TestParentFails(t *testing.T) {
	t.Run("passes", func(t *testing.T) {})
	t.Error("after its subtests")
}
`,
	"dies/dies_test.go": `package dies

import (
	"fmt"
	"os"
	"testing"
)

func TestPass(t *testing.T) {}
func TestExit(t *testing.T) { fmt.Println("goodbye"); os.Exit(3) }
`,
	"leaks/leaks_test.go": `package leaks

import (
	"fmt"
	"os"
	"testing"
)

func TestMain(m *testing.M) { m.Run(); fmt.Fprintln(os.Stderr, "left over: 1"); os.Exit(1) }
func TestPass(t *testing.T) {}
`,
	"broken/broken_test.go": "package broken\n\nfunc f() int { return undefinedThing }\n",
	"none/none.go":          "package none\n",
	"bench/bench_test.go":   "package bench\n\nimport \"testing\"\n\nfunc BenchmarkX(b *testing.B) {}\n",
}

// sum runs the tests of packages of the module.
func sum(t *testing.T, noSkip bool, args ...string) (code int, out string) {
	t.Helper()
	dir := t.TempDir()
	for name, content := range module {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	events, err := cmd.Output()
	if len(events) == 0 {
		t.Fatalf("go test -json printed nothing: %v", err)
	}
	var b strings.Builder
	s := New(&b)
	if noSkip {
		s.Refuse = Unprivileged
	}
	if err := s.Read(strings.NewReader(string(events))); err != nil {
		t.Fatal(err)
	}
	s.Finish(err != nil)
	return s.Failed, b.String()
}

func TestSummary(t *testing.T) {
	if testing.Short() {
		t.Skip("builds seven test binaries")
	}
	for _, tc := range []struct {
		name   string
		noSkip bool
		args   []string
		failed int
		last   string
		want   []string
		not    []string
	}{
		{
			"good", false, []string{"./good", "./none"}, 0, "2 passed, 0 failed, 3 skipped",
			[]string{
				"ok    example/good: 2 passed, 0 failed, 3 skipped (",
				"?     example/none: no test files",
				"  example/good TestSubs/b/c: not today\n",
				"  example/good TestSkipped: needs CAP_BPF: run as root\n",
				"  example/good TestQuiet: no reason given\n",
			},
			[]string{"failed:", "=== FAIL"},
		},
		{
			"good, where privileges have to be there", true, []string{"./good"}, 1, "2 passed, 1 failed, 2 skipped",
			[]string{
				"FAIL  example/good: 2 passed, 1 failed, 2 skipped (",
				"=== FAIL: example/good TestSkipped\nmay not be skipped here: needs CAP_BPF: run as root\n",
				"failed:\n  example/good TestSkipped\n",
			},
			nil,
		},
		{
			"bad", false, []string{"./bad"}, 3, "2 passed, 3 failed, 0 skipped",
			[]string{
				"=== FAIL: example/bad TestFail\n",
				"this is wrong",
				"=== FAIL: example/bad TestSubs/fails\n",
				"inside",
				"after its subtests",
				"FAIL  example/bad: 2 passed, 3 failed, 0 skipped (",
				"  example/bad TestParentFails\n",
			},
			nil,
		},
		{
			"dies", false, []string{"./dies"}, 1, "1 passed, 1 failed, 0 skipped",
			[]string{"=== FAIL: example/dies TestExit", "goodbye", "failed:\n  example/dies TestExit\n"},
			nil,
		},
		{
			"leaks", false, []string{"./leaks"}, 1, "1 passed, 1 failed, 0 skipped",
			[]string{"=== FAIL: example/leaks", "left over: 1", "FAIL  example/leaks: 1 passed, 1 failed, 0 skipped"},
			nil,
		},
		{
			"broken", false, []string{"./broken", "./good"}, 1, "2 passed, 1 failed, 3 skipped",
			[]string{"=== FAIL: example/broken", "undefined: undefinedThing", "FAIL  example/broken: 0 passed, 1 failed, 0 skipped", "ok    example/good"},
			nil,
		},
		{
			"benchmark", false, []string{"-bench=.", "-benchtime=1x", "./bench"}, 0, "0 passed, 0 failed, 0 skipped",
			[]string{"BenchmarkX"},
			nil,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			failed, out := sum(t, tc.noSkip, tc.args...)
			lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
			if last := lines[len(lines)-1]; last != tc.last {
				t.Errorf("last line %q, want %q", last, tc.last)
			}
			if failed != tc.failed {
				t.Errorf("%d failed, want %d", failed, tc.failed)
			}
			for _, want := range tc.want {
				if !strings.Contains(out, want) {
					t.Errorf("no %q", want)
				}
			}
			for _, not := range tc.not {
				if strings.Contains(out, not) {
					t.Errorf("%q", not)
				}
			}
			if t.Failed() {
				t.Log(out)
			}
		})
	}
}

// What the go command prints besides events is not lost, and its failure is
// one.
func TestNoEvents(t *testing.T) {
	var b strings.Builder
	s := New(&b)
	if err := s.Read(strings.NewReader("go: no such module\n{\"other\":1}\nlast")); err != nil {
		t.Fatal(err)
	}
	s.Finish(true)
	if got, want := b.String(), "go: no such module\n{\"other\":1}\nlast\n\nfailed:\n  the go command\n\n0 passed, 1 failed, 0 skipped\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestSkipReason(t *testing.T) {
	for output, want := range map[string]string{
		"":                           "no reason given",
		"=== RUN   TestX\n":          "no reason given",
		"    x_test.go:7: because\n": "because",
		"=== RUN   TestX\n    x_test.go:7: looking\n    x_test.go:8: two\n        lines\n--- SKIP: TestX (0.00s)\n":  "two lines",
		"    cmd.go:380: needs root\n    testscript.go:609: WORK=$WORK\n        PATH=/bin\n        > [!root] skip\n": "needs root",
		"    testscript.go:609: all there is\n":               "all there is",
		"    x_test.go:7: " + strings.Repeat("ö", 150) + "\n": strings.Repeat("ö", 100) + "...",
	} {
		if got := skipReason(output); got != want {
			t.Errorf("%q: %q, want %q", output, got, want)
		}
	}
}
