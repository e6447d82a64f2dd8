// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"errors"
	"fmt"
	"go/build"
	"go/parser"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// rule says what the files of some folders, tests aside, may import. The first
// rule whose folder matches is the one that counts.
type rule struct {
	// folder is a path in the module; with /... at its end it stands for what
	// is below, too.
	folder string
	// ours are the folders of this module that may be imported, in the same
	// form.
	ours []string
	// others are the modules of others that may be imported. nil allows all but
	// those of exclusive.
	others []string
}

// The arrows of ARCHITECTURE.md:
//
//	bpf <- dispatch <- {quicdemo, wgdemo, metrics, cmd}; handover beside dispatch;
//	handover <- {tcpdemo, metrics, cmd}; dispatch and handover <- run <- cmd
var rules = []rule{
	{folder: "bpf", ours: nil, others: []string{"github.com/cilium/ebpf"}},
	{folder: "dispatch/connid", ours: nil, others: []string{"github.com/dchest/siphash"}},
	{folder: "dispatch/cbpf", ours: nil, others: []string{"github.com/cilium/ebpf", "golang.org/x/net"}},
	{folder: "dispatch/quicgo/...", ours: []string{"dispatch", "dispatch/connid"}},
	{folder: "dispatch/wgbind/...", ours: []string{"dispatch", "internal/..."}},
	{folder: "dispatch", ours: []string{"bpf", "dispatch/cbpf", "dispatch/connid", "internal/..."}},
	{folder: "handover/...", ours: []string{"handover/...", "internal/..."}},
	{folder: "quicdemo/...", ours: []string{"quicdemo/...", "dispatch/...", "handover/...", "internal/..."}},
	{folder: "tcpdemo/...", ours: []string{"tcpdemo/...", "handover/...", "internal/..."}},
	{folder: "wgdemo/...", ours: []string{"wgdemo/...", "dispatch/...", "handover/...", "internal/..."}},
	{folder: "run/...", ours: []string{"run/...", "dispatch", "handover", "internal/..."}},
	{folder: "examples/...", ours: []string{"dispatch/...", "handover/..."}},
	{folder: "internal/bench/...", ours: []string{"internal/...", "bpf", "dispatch/..."}},
	{folder: "internal/doctor/...", ours: []string{"internal/...", "dispatch", "handover"}},
	{folder: "internal/...", ours: []string{"internal/..."}},
	{folder: "metrics", ours: []string{"dispatch", "handover", "internal/..."}},
	{folder: "cmd/...", ours: []string{"..."}},
}

// exclusive modules have one home: whoever else wants something of them asks
// there.
var exclusive = map[string][]string{
	"github.com/quic-go/quic-go":          {"dispatch/quicgo/...", "quicdemo/..."},
	"golang.zx2c4.com/wireguard":          {"dispatch/wgbind/...", "wgdemo/..."},
	"github.com/prometheus/client_golang": {"metrics"},
	"github.com/prometheus/common":        {"metrics"},
}

// testOnly are for tests alone, wherever they are.
var testOnly = []string{"internal/testutil/...", "internal/kerneltest/..."}

// mains are commands whose main file is no more than a call of a package, and
// how many lines of code that may take.
var mains = map[string]int{"cmd/instar": 20, "cmd/quicdemo": 20, "cmd/wgdemo": 20}

// source is a Go file that is no test.
type source struct {
	folder  string // in the module
	name    string
	imports []string
}

// check returns a line for each import that no rule allows.
func check(module string, files []source) []string {
	var wrong []string
	for _, f := range files {
		r, ok := ruleOf(f.folder)
		if !ok {
			wrong = append(wrong, fmt.Sprintf("%s: the folder has no rule in internal/archtest", f.folder))
			continue
		}
		for _, imported := range f.imports {
			if why := refuse(module, r, f.folder, imported); why != "" {
				wrong = append(wrong, fmt.Sprintf("%s imports %s: %s", path.Join(f.folder, f.name), imported, why))
			}
		}
	}
	return wrong
}

func ruleOf(folder string) (rule, bool) {
	for _, r := range rules {
		if matches(r.folder, folder) {
			return r, true
		}
	}
	return rule{}, false
}

// refuse says why the import is not allowed; it is empty where it is.
func refuse(module string, r rule, folder, imported string) string {
	if ours, ok := within(module, imported); ok {
		if anyMatches(testOnly, ours) && !anyMatches(testOnly, folder) && !matches("internal/vmtest/...", folder) {
			return ours + " is for tests"
		}
		if ours != folder && !anyMatches(r.ours, ours) {
			return fmt.Sprintf("%s may import of this module: %s", r.folder, list(r.ours))
		}
		return ""
	}
	if first, _, _ := strings.Cut(imported, "/"); !strings.Contains(first, ".") {
		return "" // the standard library
	}
	for other, homes := range exclusive {
		if _, ok := within(other, imported); ok && !anyMatches(homes, folder) {
			return "only these may: " + list(homes)
		}
	}
	if r.others == nil {
		return ""
	}
	for _, other := range r.others {
		if _, ok := within(other, imported); ok {
			return ""
		}
	}
	return fmt.Sprintf("%s may import of others: %s", r.folder, list(r.others))
}

// within reports whether the import path is of the module, and its folder
// there.
func within(module, imported string) (folder string, ok bool) {
	if imported == module {
		return ".", true
	}
	return strings.CutPrefix(imported, module+"/")
}

func matches(pattern, folder string) bool {
	if pattern == "..." {
		return true
	}
	parent, below := strings.CutSuffix(pattern, "/...")
	return folder == parent || below && strings.HasPrefix(folder, parent+"/")
}

func anyMatches(patterns []string, folder string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return matches(p, folder) })
}

func list(patterns []string) string {
	if len(patterns) == 0 {
		return "nothing"
	}
	return strings.Join(patterns, ", ")
}

// load reads the imports of all Go files below root that are built on Linux
// and are no tests.
func load(root string) ([]source, error) {
	var files []source
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			hidden := strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata"
			if file != root && (hidden || exists(filepath.Join(file, "go.mod"))) {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		dir := filepath.Dir(file)
		if built, err := build.Default.MatchFile(dir, name); err != nil || !built {
			return err
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		folder, err := filepath.Rel(root, dir)
		if err != nil {
			return err
		}
		s := source{folder: filepath.ToSlash(folder), name: name}
		for _, spec := range parsed.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			s.imports = append(s.imports, imported)
		}
		files = append(files, s)
		return nil
	})
	return files, err
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// linesOfCode counts the lines that have more than a comment.
func linesOfCode(src []byte) int {
	fset := token.NewFileSet()
	file := fset.AddFile("", fset.Base(), len(src))
	var s scanner.Scanner
	s.Init(file, src, nil, 0)
	lines := map[int]bool{}
	for {
		pos, tok, literal := s.Scan()
		if tok == token.EOF {
			return len(lines)
		}
		if tok == token.SEMICOLON && literal == "\n" {
			continue
		}
		for i := range strings.Count(literal, "\n") + 1 {
			lines[file.Line(pos)+i] = true
		}
	}
}

func repository(t *testing.T) (root, module string) {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^module\s+(\S+)`).FindSubmatch(mod)
	if m == nil {
		t.Fatal("go.mod names no module")
	}
	return root, string(m[1])
}

func TestImports(t *testing.T) {
	root, module := repository(t)
	files, err := load(root)
	if err != nil {
		t.Fatal(err)
	}
	// It did find the files.
	for _, folder := range []string{"bpf", "dispatch/connid", "internal/bpffs"} {
		if !slices.ContainsFunc(files, func(s source) bool { return s.folder == folder && len(s.imports) > 0 }) {
			t.Errorf("found no file with imports in %s", folder)
		}
	}
	for _, line := range check(module, files) {
		t.Error(line)
	}
}

func TestShortMains(t *testing.T) {
	root, _ := repository(t)
	found := 0
	for folder, limit := range mains {
		src, err := os.ReadFile(filepath.Join(root, folder, "main.go"))
		if errors.Is(err, fs.ErrNotExist) {
			continue // TestImports would miss it if it had another name
		}
		if err != nil {
			t.Fatal(err)
		}
		found++
		if lines := linesOfCode(src); lines > limit {
			t.Errorf("%s/main.go has %d lines of code, at most %d: the rest belongs in a package that tests can call", folder, lines, limit)
		}
		files, err := filepath.Glob(filepath.Join(root, folder, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if name := filepath.Base(f); name != "main.go" && !strings.HasSuffix(name, "_test.go") {
				t.Errorf("%s/%s: the command has code beside main.go", folder, name)
			}
		}
	}
	if found == 0 {
		t.Error("found no command")
	}
}

// The rules, tried on made-up imports.
func TestCheck(t *testing.T) {
	for _, tc := range []struct {
		folder, imported string
		want             string // part of the complaint; empty where it is allowed
	}{
		{"bpf", "os", ""},
		{"bpf", "github.com/cilium/ebpf", ""},
		{"bpf", "github.com/cilium/ebpf/btf", ""},
		{"bpf", "github.com/cilium/ebpfx", "may import of others: github.com/cilium/ebpf"},
		{"bpf", "m/internal/kernel", "bpf may import of this module: nothing"},
		{"bpf", "m/dispatch", "nothing"},
		{"dispatch/connid", "crypto/aes", ""},
		{"dispatch/connid", "github.com/dchest/siphash", ""},
		{"dispatch/connid", "golang.org/x/sys/unix", "may import of others: github.com/dchest/siphash"},
		{"dispatch/connid", "m/dispatch", "nothing"},
		{"dispatch/connid", "m/internal/kernel", "nothing"},
		{"dispatch/cbpf", "github.com/cilium/ebpf/asm", ""},
		{"dispatch/cbpf", "golang.org/x/net/bpf", ""},
		{"dispatch/cbpf", "golang.org/x/sys/unix", "may import of others: github.com/cilium/ebpf, golang.org/x/net"},
		{"dispatch/cbpf", "m/bpf", "nothing"},
		{"dispatch", "m/dispatch/cbpf", ""},
		{"dispatch", "m/bpf", ""},
		{"dispatch", "m/dispatch/connid", ""},
		{"dispatch", "m/internal/sockdiag", ""},
		{"dispatch", "golang.org/x/sys/unix", ""},
		{"dispatch", "m/dispatch/quicgo", "dispatch may import"},
		{"dispatch", "m/handover", "dispatch may import"},
		{"dispatch", "m/internal/testutil", "is for tests"},
		{"dispatch", "github.com/quic-go/quic-go", "only these may: dispatch/quicgo/..., quicdemo/..."},
		{"dispatch/quicgo", "m/dispatch", ""},
		{"dispatch/quicgo", "m/dispatch/connid", ""},
		{"dispatch/quicgo", "github.com/quic-go/quic-go", ""},
		{"dispatch/quicgo", "m/bpf", "dispatch/quicgo/... may import"},
		{"dispatch/quicgo", "m/handover", "dispatch/quicgo/... may import"},
		{"dispatch/other", "m/bpf", "the folder has no rule"},
		{"handover", "m/internal/kernel", ""},
		{"handover", "m/dispatch", "handover/... may import"},
		{"handover", "m/bpf", "handover/... may import"},
		{"handover/systemd", "m/handover", ""},
		{"quicdemo", "m/dispatch/quicgo", ""},
		{"quicdemo", "github.com/quic-go/quic-go/http3", ""},
		{"quicdemo", "m/cmd/instar/cli", "quicdemo/... may import"},
		{"quicdemo", "m/bpf", "quicdemo/... may import"},
		{"tcpdemo", "m/handover", ""},
		{"tcpdemo", "m/handover/drain", ""},
		{"tcpdemo", "m/internal/sandbox", ""},
		{"tcpdemo", "m/dispatch", "tcpdemo/... may import"},
		{"wgdemo", "golang.zx2c4.com/wireguard/device", ""},
		{"quicdemo", "golang.zx2c4.com/wireguard/device", "only these may: dispatch/wgbind/..., wgdemo/..."},
		{"dispatch/wgbind", "golang.zx2c4.com/wireguard/conn", ""},
		{"dispatch/wgbind", "m/dispatch", ""},
		{"dispatch/wgbind", "m/handover", "dispatch/wgbind/... may import"},
		{"cmd/instar/cli", "m/dispatch", ""},
		{"cmd/instar/cli", "m/internal/testutil", "is for tests"},
		{"run", "m/dispatch", ""},
		{"run", "m/handover", ""},
		{"run", "m/bpf", "run/... may import"},
		{"handover", "m/run", "handover/... may import"},
		{"metrics", "github.com/prometheus/client_golang/prometheus", ""},
		{"metrics", "m/dispatch", ""},
		{"metrics", "m/handover", ""},
		{"metrics", "m/cmd/instar/cli", "metrics may import"},
		{"metrics", "github.com/quic-go/quic-go", "only these may"},
		{"cmd/instar/cli", "m/metrics", ""},
		{"cmd/instar/cli", "github.com/prometheus/client_golang/prometheus", "only these may: metrics"},
		{"dispatch", "m/metrics", "dispatch may import"},
		{"cmd/quicdemo", "m/quicdemo", ""},
		{"cmd/quicdemo", "github.com/quic-go/quic-go", "only these may"},
		{"internal/bpffs", "m/internal/kernel", ""},
		{"internal/bpffs", "m/dispatch", "internal/... may import"},
		{"internal/bpffs", "m/internal/testutil", "is for tests"},
		{"internal/testutil", "m/internal/kernel", ""},
		{"internal/testutil/more", "m/internal/testutil", ""},
		{"cmd/instar/cli", "m/internal/testutil/more", "is for tests"},
		{"internal/bench", "m/dispatch", ""},
		{"internal/bench", "m/internal/kernel", ""},
		{"internal/bench", "m/handover", "internal/bench/... may import"},
		{"internal/doctor", "m/dispatch", ""},
		{"internal/doctor", "m/handover", ""},
		{"internal/doctor", "m/bpf", "internal/doctor/... may import"},
		{"internal/doctor", "m/internal/kerneltest", "is for tests"},
		{"newfolder", "os", "the folder has no rule"},
		{".", "os", "the folder has no rule"},
		{"dispatch", "mother/thing", ""}, // another module of the standard library's form
	} {
		got := check("m", []source{{tc.folder, "x.go", []string{tc.imported}}})
		switch {
		case tc.want == "" && len(got) > 0:
			t.Errorf("%s imports %s: %q, want it allowed", tc.folder, tc.imported, got)
		case tc.want != "" && (len(got) != 1 || !strings.Contains(got[0], tc.want)):
			t.Errorf("%s imports %s: %q, want %q", tc.folder, tc.imported, got, tc.want)
		}
	}
}

func TestLoad(t *testing.T) {
	root := t.TempDir()
	for name, content := range map[string]string{
		"go.mod":               "module m\n",
		"a/a.go":               "package a\n\nimport (\n\t\"os\"\n\tx \"m/b\"\n)\n",
		"a/a_test.go":          "package a\n\nimport \"m/internal/testutil\"\n",
		"a/ignored.go":         "//go:build ignore\n\npackage a\n\nimport \"m/c\"\n",
		"a/other_windows.go":   "package a\n\nimport \"m/c\"\n",
		"a/testdata/x.go":      "package x\n\nimport \"m/c\"\n",
		"a/.hidden/x.go":       "package x\n\nimport \"m/c\"\n",
		"nested/go.mod":        "module n\n",
		"nested/x.go":          "package x\n\nimport \"m/c\"\n",
		"a/b/c/deep.go":        "package c\n",
		"not-go/README.md":     "",
		"a/_underscore/x.go":   "package x\n\nimport \"m/c\"\n",
		"a/b/generated_lin.go": "package b\n\nimport _ \"embed\"\n",
	} {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files, err := load(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []source{
		{"a", "a.go", []string{"os", "m/b"}},
		{"a/b/c", "deep.go", nil},
		{"a/b", "generated_lin.go", []string{"embed"}},
	}
	if fmt.Sprint(files) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", files, want)
	}
}

func TestLinesOfCode(t *testing.T) {
	for src, want := range map[string]int{
		"": 0,
		"// SPDX\n\n// Package main.\npackage main\n":                                     1,
		"package main\n\nimport \"os\"\n\nfunc main() {\n\tos.Exit(f(\n\t\t1,\n\t))\n}\n": 7,
		"package main\n\nvar x = `a\nb\nc`\n":                                             4,
		"package main /* c\n c\n c */\n":                                                  1,
	} {
		if got := linesOfCode([]byte(src)); got != want {
			t.Errorf("%q: %d lines, want %d", src, got, want)
		}
	}
}
