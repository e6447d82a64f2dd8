// SPDX-License-Identifier: Apache-2.0

package readmetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// setup makes the namespaces usable and runs the script. The first argument is
// the folder of the tree.
const setup = `set -eu
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
cd "$1"
exec bash -eu -o pipefail ../script
`

// shell runs the script of a session in namespaces of its own, in a copy of
// the tree, and returns what it printed.
func shell(ctx context.Context, tree, dir string, s session) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	work := filepath.Join(dir, "tree")
	if err := copyTree(work, tree); err != nil {
		return "", fmt.Errorf("copy the tree: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "script"), []byte(s.script), 0o600); err != nil {
		return "", err
	}
	// Whatever the script leaves running ends with the PID namespace.
	cmd := exec.CommandContext(ctx, "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
		"sh", "-c", setup, "sh", work)
	cmd.Env = append(os.Environ(), "GOPROXY=off", "GOTOOLCHAIN=local")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		err = fmt.Errorf("%w (%w)", ctx.Err(), err)
	}
	if err != nil {
		return out.String(), fmt.Errorf("run: %w", err)
	}
	var errs []error
	for _, want := range s.want {
		if !want.MatchString(out.String()) {
			errs = append(errs, fmt.Errorf("the output does not match %q", want))
		}
	}
	return out.String(), errors.Join(errs...)
}

// copyTree copies the files of a working tree, without git's folder.
func copyTree(to, from string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // a file of another test's, which is gone
			}
			return err
		}
		if d.Name() == ".git" {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case d.IsDir():
			return os.MkdirAll(target, 0o755)
		case !d.Type().IsRegular():
			return nil
		}
		content, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		return os.WriteFile(target, content, info.Mode().Perm())
	})
}

// compile builds a program in a module of its own that replaces ours by the
// tree.
func compile(ctx context.Context, tree, dir, program string) error {
	file, err := parser.ParseFile(token.NewFileSet(), "main.go", program, parser.PackageClauseOnly)
	if err != nil {
		return fmt.Errorf("parse: %w (a block of go is a complete program, or <!-- not run: REASON -->)", err)
	}
	if file.Name.Name != "main" {
		return fmt.Errorf("the program is of package %s, want main", file.Name.Name)
	}
	formatted, err := format.Source([]byte(program))
	if err != nil {
		return fmt.Errorf("format: %w", err)
	}
	if string(formatted) != program {
		return errors.New("the program is not as gofmt has it")
	}
	mod, err := os.ReadFile(filepath.Join(tree, "go.mod"))
	if err != nil {
		return err
	}
	module := regexp.MustCompile(`(?m)^module\s+(\S+)`).FindSubmatch(mod)
	version := regexp.MustCompile(`(?m)^go\s+(\S+)`).FindSubmatch(mod)
	if module == nil || version == nil {
		return errors.New("go.mod of the tree names no module or no version of Go")
	}
	sum, err := os.ReadFile(filepath.Join(tree, "go.sum"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for name, content := range map[string]string{
		"main.go": program,
		"go.mod":  fmt.Sprintf("module example\n\ngo %s\n\nrequire %[2]s v0.0.0\n\nreplace %[2]s => %[3]s\n", version[1], module[1], tree),
		"go.sum":  string(sum),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			return err
		}
	}
	for _, args := range [][]string{{"build", "-o", os.DevNull, "."}, {"vet", "."}} {
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOWORK=off", "GOPROXY=off", "GOTOOLCHAIN=local")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go %s: %w\n%s", args[0], err, out)
		}
	}
	return nil
}

// needModules skips the test where the go command would have to download
// modules.
func needModules(t *testing.T) {
	t.Helper()
	testutil.NeedCommand(t, "go", "golang")
	out, err := exec.Command("go", "env", "GOMODCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(strings.TrimSpace(string(out))); err != nil {
		testutil.Skip(t, "needs the modules of go.sum on this machine, run go mod download: %v", err)
	}
}

// README and all documents are true: programs compile, and sessions run.
func TestDocuments(t *testing.T) {
	tree, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	documents, err := filepath.Glob(filepath.Join(tree, "docs", "*.md"))
	if err != nil || len(documents) == 0 {
		t.Fatal(documents, err)
	}
	for _, document := range append(documents, filepath.Join(tree, "README.md")) {
		t.Run(filepath.Base(document), func(t *testing.T) { testDocument(t, tree, document) })
	}
}

func testDocument(t *testing.T, tree, document string) {
	markdown, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	blocks, err := parse(string(markdown))
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if b.language != "go" || b.notRun != "" {
			continue
		}
		t.Run(fmt.Sprintf("line %d", b.line), func(t *testing.T) {
			needModules(t)
			if err := compile(t.Context(), tree, t.TempDir(), b.text); err != nil {
				t.Error(err)
			}
		})
	}
	for _, s := range sessions(blocks) {
		t.Run(s.name, func(t *testing.T) {
			if testing.Short() {
				t.Skip("takes as long as the commands of the document do")
			}
			testutil.NeedRoot(t)
			needModules(t)
			if out, err := shell(t.Context(), tree, t.TempDir(), s); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// sample makes a module to try the harness on.
func sample(t *testing.T) string {
	t.Helper()
	tree := t.TempDir()
	for name, content := range map[string]string{
		"go.mod":      "module sample\n\ngo 1.26\n",
		"greet/g.go":  "package greet\n\n// Greeting is polite.\nconst Greeting = \"good morning\"\n",
		".git/config": "",
	} {
		path := filepath.Join(tree, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return tree
}

func TestCompile(t *testing.T) {
	if testing.Short() {
		t.Skip("builds programs")
	}
	testutil.NeedCommand(t, "go", "golang")
	tree := sample(t)
	const good = `package main

import (
	"fmt"

	"sample/greet"
)

func main() { fmt.Println(greet.Greeting) }
`
	if err := compile(t.Context(), tree, t.TempDir(), good); err != nil {
		t.Errorf("a good program: %v", err)
	}
	for name, tc := range map[string]struct{ program, want string }{
		"a fragment":           {"x := 1\n", "a block of go is a complete program"},
		"another package":      {"package greet\n", "of package greet"},
		"not formatted":        {"package main\n\nfunc  main() {}\n", "not as gofmt has it"},
		"does not parse":       {"package main\n\nfunc main() {\n", "format:"},
		"does not compile":     {strings.Replace(good, "Greeting", "Farewell", 1), "undefined: greet.Farewell"},
		"does not pass vet":    {strings.Replace(good, "Println(", "Printf(\"%d\", ", 1), "Printf format %d"},
		"a module that is not": {strings.Replace(good, "sample/greet", "example.invalid/greet", 1), "example.invalid/greet"},
	} {
		if err := compile(t.Context(), tree, t.TempDir(), tc.program); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

func TestShell(t *testing.T) {
	testutil.NeedRoot(t)
	tree := sample(t)
	netns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	run := func(script string, timeout time.Duration, want ...string) (string, error) {
		t.Helper()
		s := session{script: script, timeout: timeout}
		for _, w := range want {
			s.want = append(s.want, regexp.MustCompile(w))
		}
		return shell(t.Context(), tree, t.TempDir(), s)
	}

	out, err := run(`readlink /proc/self/ns/net
stat -f -c %T /sys/fs/bpf
mkdir /sys/fs/bpf/readmetest
ip -brief link
cat greet/g.go
ls -d .git || echo no git
echo "$$"
touch written
sleep 1000 &
`, time.Minute, "good morning", `(?m)^bpf_fs$`, `(?m)^lo +UNKNOWN`, "no git")
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if strings.Contains(out, netns) {
		t.Errorf("the script ran in the network namespace of the test:\n%s", out)
	}
	for _, path := range []string{"/sys/fs/bpf/readmetest", filepath.Join(tree, "written")} {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the script left %s: %v", path, err)
		}
	}

	for name, tc := range map[string]struct {
		script  string
		timeout time.Duration
		wants   []string
		err     string
	}{
		"a command fails":       {"false\ntrue\n", time.Minute, nil, "exit status 1"},
		"a variable is not set": {"echo $nothing_of_this_name\n", time.Minute, nil, "exit status"},
		"a pipe fails":          {"false | true\n", time.Minute, nil, "exit status 1"},
		"the output is another": {"echo a\n", time.Minute, []string{"a", "^b$"}, `does not match "^b$"`},
		"it takes too long":     {"sleep 1000 & wait\n", 300 * time.Millisecond, nil, context.DeadlineExceeded.Error()},
	} {
		if out, err := run(tc.script, tc.timeout, tc.wants...); err == nil || !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: %v, want %q\n%s", name, err, tc.err, out)
		}
	}
}
