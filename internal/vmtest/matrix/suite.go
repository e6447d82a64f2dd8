// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os/exec"
	"path"
	"slices"
	"strings"
	"time"

	"instar/internal/testsum/summary"
	"instar/internal/vmtest"
)

// suite is a package whose tests depend on the kernel.
type suite struct {
	pkg    string
	weight int // the longest are begun first
}

var suites = []suite{
	{"bpf", 3},
	{"dispatch", 5},
	{"dispatch/quicgo", 2},
	{"handover", 4},
	{"internal/kerneltest", 1},
}

// limit of a suite's tests, which take a minute or two.
const limit = 15 * time.Minute

// result is a suite under a kernel.
type result struct {
	series string
	kernel *vmtest.Kernel
	suite  *suite

	err    error            // the kernel cannot be had, or the machine failed
	tests  *summary.Summary // nil when there is no kernel
	output bytes.Buffer     // failures in full
	took   time.Duration
	unused []allowance // were not needed
}

// run runs the tests in a machine of their own.
func (r *result) run(ctx context.Context, built programs) {
	began := time.Now()
	r.tests = summary.New(&r.output)
	used := map[int]bool{}
	r.tests.Refuse = func(s summary.Skip) bool {
		i := allowed(r.suite.pkg, r.series, s)
		used[i] = true
		return i < 0
	}
	pkg := "instar/" + r.suite.pkg
	reader, writer := io.Pipe()
	// It is what turns the output of a test binary into events.
	convert := exec.CommandContext(ctx, "go", "tool", "test2json", "-p", pkg)
	convert.Stdin = reader
	events, err := convert.StdoutPipe()
	if err != nil {
		r.err = err
		return
	}
	if err := convert.Start(); err != nil {
		r.err = err
		return
	}
	read := make(chan error, 1)
	go func() { read <- r.tests.Read(events) }()

	m := vmtest.Machine{
		Kernel: r.kernel, Guest: built.guest, Program: built.tests[r.suite.pkg],
		Args:  []string{"-test.v=test2json", "-test.short", "-test.timeout=" + limit.String()},
		Env:   []string{"INSTAR_TEST_MACHINE=1"},
		Dir:   path.Join(vmtest.Source, r.suite.pkg),
		Files: built.testdata, Tools: vmtest.DefaultTools, Modules: vmtest.DefaultModules,
		Timeout: limit + time.Minute, Output: writer, Log: &r.output,
	}
	code, err := m.Run(ctx)
	_ = writer.Close() // never fails
	readErr := <-read
	if waitErr := convert.Wait(); readErr == nil {
		readErr = waitErr
	}
	if err == nil {
		err = readErr
	}
	r.err = err
	r.tests.Finish(code != 0 || err != nil)
	r.took = time.Since(began)
	for i, a := range allowances {
		if a.applies(r.suite.pkg, r.series) && !used[i] {
			r.unused = append(r.unused, a)
		}
	}
}

// failures counts what is wrong: tests, and the machine itself.
func (r *result) failures() int {
	n := len(r.unused)
	if r.tests != nil {
		n += r.tests.Failed
	}
	if r.err != nil && (r.tests == nil || r.tests.Failed == 0) {
		n++
	}
	return n
}

func (r *result) name() string {
	if r.suite == nil {
		return "Linux " + r.series
	}
	return fmt.Sprintf("Linux %s, %s", r.kernel.Release, r.suite.pkg)
}

// line is for who waits.
func (r *result) line() string {
	return fmt.Sprintf("%s: %d passed, %d failed, %d skipped (%.0fs)", r.name(), r.tests.Passed, r.failures(), r.tests.Skipped, r.took.Seconds())
}

// report prints all results and returns how many failures there are.
func report(w io.Writer, results []*result) (failed int) {
	fmt.Fprintf(w, "\npassed/failed/skipped\n%-34s", "")
	for _, s := range suites {
		fmt.Fprintf(w, " %20s", s.pkg)
	}
	fmt.Fprintln(w)
	var rows []string
	for _, r := range results {
		if !slices.Contains(rows, r.series) {
			rows = append(rows, r.series)
			reportRow(w, r.series, results)
		}
	}
	reportSkips(w, results)
	for _, r := range results {
		failed += r.failures()
		reportFailures(w, r)
	}
	return failed
}

func reportRow(w io.Writer, series string, results []*result) {
	label, row := series, ""
	for i := range suites {
		cell := "-"
		for _, r := range results {
			if r.series != series {
				continue
			}
			if r.kernel != nil {
				label = fmt.Sprintf("%-7s %s", series, r.kernel.Release)
			}
			if r.suite == &suites[i] && r.tests != nil {
				cell = fmt.Sprintf("%d/%d/%d", r.tests.Passed, r.failures(), r.tests.Skipped)
			}
		}
		row += fmt.Sprintf(" %20s", cell)
	}
	fmt.Fprintf(w, "%-34s%s\n", label, row)
}

// reportSkips prints each reason once, with where it was given.
func reportSkips(w io.Writer, results []*result) {
	where := map[string][]string{}
	var order []string
	for _, r := range results {
		if r.tests == nil {
			continue
		}
		for _, s := range r.tests.Skips {
			what := fmt.Sprintf("%s %s: %s", r.suite.pkg, s.Test, s.Reason)
			if where[what] == nil {
				order = append(order, what)
			}
			where[what] = append(where[what], r.series)
		}
	}
	if len(order) > 0 {
		fmt.Fprintln(w, "\nskipped:")
	}
	for _, what := range order {
		fmt.Fprintf(w, "  %s [%s]\n", what, strings.Join(where[what], " "))
	}
}

func reportFailures(w io.Writer, r *result) {
	if r.failures() == 0 {
		return
	}
	fmt.Fprintf(w, "\n====== FAIL: %s\n", r.name())
	if r.err != nil {
		fmt.Fprintln(w, r.err)
	}
	for _, a := range r.unused {
		fmt.Fprintf(w, "not skipped, though %s may be (%q): take it out of internal/vmtest/matrix/allow.go\n", a.test, a.reason)
	}
	_, _ = w.Write(r.output.Bytes())
}
