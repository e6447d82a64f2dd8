// SPDX-License-Identifier: Apache-2.0

// Package summary reads the events of go test -json and says what happened: a line for
// each package, failures in full, and at the end what was skipped, and why.
package summary

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
)

// event is a line of go test -json (cmd/test2json, go help buildjson).
type event struct {
	Action      string
	Package     string
	Test        string
	Elapsed     float64
	Output      string
	ImportPath  string // of build events
	FailedBuild string // the ImportPath whose build failed
}

// test is what is known of a test that runs.
type test struct {
	name      string
	parent    *test
	output    strings.Builder
	hasSubs   bool
	subFailed bool
}

// pkg is what is known of a package that runs.
type pkg struct {
	running                 map[string]*test
	output                  strings.Builder // of no test
	passed, failed, skipped int
	cached                  bool
}

// Skip is a test that was skipped.
type Skip struct{ Package, Test, Reason string }

// Summary counts tests. A test with subtests is counted through them; it
// counts itself only where it fails and none of them does. A package that
// fails with no failed test (it does not build, TestMain fails) counts as one.
type Summary struct {
	// Verbose prints the output of all tests.
	Verbose bool
	// Refuse says whether a skip is a failure. Default: none is.
	Refuse func(Skip) bool

	Passed, Failed, Skipped int
	Skips                   []Skip   // those that are no failures
	Failures                []string // packages and tests

	w        io.Writer
	packages map[string]*pkg
	builds   map[string]*strings.Builder
}

// New returns a summary that prints to w.
func New(w io.Writer) *Summary {
	return &Summary{w: w, packages: map[string]*pkg{}, builds: map[string]*strings.Builder{}}
}

// Read takes the output of go test -json to its end. Lines that are no events
// are printed.
func (s *Summary) Read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil || e.Action == "" {
				fmt.Fprintf(s.w, "%s\n", strings.TrimSuffix(string(line), "\n"))
			} else {
				s.add(e)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read output of go test: %w", err)
		}
	}
}

func (s *Summary) add(e event) {
	switch e.Action {
	case "build-output":
		b := s.builds[e.ImportPath]
		if b == nil {
			b = &strings.Builder{}
			s.builds[e.ImportPath] = b
		}
		b.WriteString(e.Output)
		return
	case "build-fail":
		return
	}
	p := s.packages[e.Package]
	if p == nil {
		p = &pkg{running: map[string]*test{}}
		s.packages[e.Package] = p
	}
	switch {
	case e.Action == "output":
		s.output(p, e)
	case e.Action == "run":
		p.start(e.Test)
	case e.Test != "":
		s.endTest(p, e.Package, e.Test, e.Action)
	case e.Action == "pass" || e.Action == "fail" || e.Action == "skip":
		s.endPackage(p, e)
	}
}

func (p *pkg) start(name string) *test {
	t := &test{name: name}
	if i := strings.LastIndexByte(name, '/'); i >= 0 {
		// The name of a subtest may have slashes: the parent is the longest
		// prefix that runs.
		for ; i >= 0; i = strings.LastIndexByte(name[:i], '/') {
			if parent := p.running[name[:i]]; parent != nil {
				t.parent, parent.hasSubs = parent, true
				break
			}
		}
	}
	p.running[name] = t
	return t
}

func (s *Summary) output(p *pkg, e event) {
	if s.Verbose || strings.HasPrefix(e.Test, "Benchmark") {
		fmt.Fprint(s.w, e.Output)
	}
	if t := p.running[e.Test]; t != nil {
		t.output.WriteString(e.Output)
		return
	}
	// The package's own last line is made by endPackage.
	if strings.HasPrefix(e.Output, "ok  \t") {
		p.cached = strings.Contains(e.Output, "(cached)")
		return
	}
	p.output.WriteString(e.Output)
}

// privilege finds reasons for a skip that no complete environment has.
var privilege = regexp.MustCompile(`(?i)\broot\b|\bCAP_|capabilit|privilege|permission|permitted`)

// Unprivileged says whether a test was skipped for want of a privilege.
func Unprivileged(s Skip) bool { return privilege.MatchString(s.Reason) }

func (s *Summary) endTest(p *pkg, pkgName, name, action string) {
	t := p.running[name]
	if t == nil {
		t = p.start(name) // a benchmark has no run event
	}
	counts := !t.hasSubs
	switch action {
	case "pass":
		if counts {
			p.passed++
		}
	case "skip":
		skip := Skip{pkgName, name, skipReason(t.output.String())}
		if s.Refuse != nil && s.Refuse(skip) {
			p.failed++
			s.fail(pkgName, name, "may not be skipped here: "+skip.Reason+"\n")
			break
		}
		if counts {
			p.skipped++
			s.Skips = append(s.Skips, skip)
		}
	case "fail":
		if counts || !t.subFailed {
			p.failed++
		}
		s.fail(pkgName, name, t.output.String())
		for parent := t.parent; parent != nil; parent = parent.parent {
			parent.subFailed = true
		}
	default:
		return // pause, cont, start, bench, attr, artifacts
	}
	delete(p.running, name)
}

func (s *Summary) fail(pkgName, name, output string) {
	s.Failures = append(s.Failures, strings.TrimSpace(pkgName+" "+name))
	fmt.Fprintf(s.w, "\n=== FAIL: %s %s\n%s\n", pkgName, name, strings.TrimRight(output, "\n"))
}

// located is a line that t.Log, t.Skip and the like print.
var located = regexp.MustCompile(`^\s*\S+\.go:\d+: `)

// reasonLimit is where a reason is cut off.
const reasonLimit = 200

// skipReason is the last thing that a skipped test printed, without its place.
// A testscript prints its reason before its log.
func skipReason(output string) string {
	var lines []string
	for line := range strings.Lines(output) {
		trimmed := strings.TrimSpace(line)
		if trimmed == "" || strings.HasPrefix(trimmed, "=== ") || strings.HasPrefix(trimmed, "--- ") {
			continue
		}
		if place := located.FindString(line); strings.HasPrefix(strings.TrimSpace(place), "testscript.go:") && len(lines) > 0 {
			break
		} else if place != "" {
			lines = []string{strings.TrimSpace(line[len(place):])}
		} else {
			lines = append(lines, trimmed) // of a message of several lines
		}
	}
	if len(lines) == 0 {
		return "no reason given"
	}
	reason := strings.Join(lines, " ")
	if len(reason) > reasonLimit {
		reason = strings.ToValidUTF8(reason[:reasonLimit], "") + "..."
	}
	return reason
}

func (s *Summary) endPackage(p *pkg, e event) {
	delete(s.packages, e.Package)
	if e.Action == "fail" {
		// A test that did not end: the process died in it, or ran out of time.
		for name, t := range p.running {
			if !t.hasSubs {
				p.failed++
				s.fail(e.Package, name, t.output.String()+"(did not end)")
			}
		}
		output := p.output.String()
		if b := s.builds[e.FailedBuild]; e.FailedBuild != "" && b != nil {
			output = b.String() + output
		}
		if p.failed == 0 {
			p.failed++
			s.fail(e.Package, "", output)
		} else if extra := strings.TrimSpace(output); extra != "" && extra != "FAIL" {
			fmt.Fprintf(s.w, "\n=== %s\n%s\n", e.Package, strings.TrimRight(output, "\n"))
		}
	}
	s.Passed += p.passed
	s.Failed += p.failed
	s.Skipped += p.skipped
	switch {
	case e.Action == "skip":
		fmt.Fprintf(s.w, "?     %s: no test files\n", e.Package)
		return
	case p.failed > 0:
		fmt.Fprintf(s.w, "FAIL  ")
	default:
		fmt.Fprintf(s.w, "ok    ")
	}
	fmt.Fprintf(s.w, "%s: %s", e.Package, counts(p.passed, p.failed, p.skipped))
	if p.cached {
		fmt.Fprintln(s.w, " (cached)")
	} else {
		fmt.Fprintf(s.w, " (%.1fs)\n", e.Elapsed)
	}
}

func counts(passed, failed, skipped int) string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", passed, failed, skipped)
}

// Finish prints what was skipped and what failed, and the closing line. A go
// command that failed without a failed test counts as a failure.
func (s *Summary) Finish(commandFailed bool) {
	for name, p := range s.packages {
		s.endPackage(p, event{Action: "fail", Package: name})
	}
	if commandFailed && s.Failed == 0 {
		s.Failed++
		s.Failures = append(s.Failures, "the go command")
	}
	if len(s.Skips) > 0 {
		fmt.Fprintf(s.w, "\nskipped:\n")
		for _, k := range s.Skips {
			fmt.Fprintf(s.w, "  %s %s: %s\n", k.Package, k.Test, k.Reason)
		}
	}
	if len(s.Failures) > 0 {
		fmt.Fprintf(s.w, "\nfailed:\n")
		for _, f := range s.Failures {
			fmt.Fprintf(s.w, "  %s\n", f)
		}
	}
	fmt.Fprintf(s.w, "\n%s\n", counts(s.Passed, s.Failed, s.Skipped))
}
