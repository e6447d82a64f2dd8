// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"instar/internal/kerneltest"
	"instar/internal/testsum/summary"
	"instar/internal/vmtest"
)

// The document is what comes out of the list, whose tests run on each kernel.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("../../..", document))
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != kerneltest.Document() {
		t.Errorf("%s is not what internal/kerneltest makes: run scripts/test-kernels --doc", document)
	}
}

// The columns of the document are the kernels that are tested.
func TestSeries(t *testing.T) {
	var want []string
	for _, v := range kerneltest.Series {
		want = append(want, v.String())
	}
	if want = append(want, vmtest.Newest); !slices.Equal(vmtest.Series, want) {
		t.Errorf("tests run on %q, the columns are %q", vmtest.Series, want)
	}
}

// What may be skipped is of suites that there are, on series that there are.
func TestAllowances(t *testing.T) {
	for _, a := range allowances {
		if !slices.ContainsFunc(suites, func(s suite) bool { return s.pkg == a.pkg }) || a.test == "" || a.reason == "" {
			t.Errorf("%+v", a)
		}
		for _, s := range a.series {
			if !slices.Contains(vmtest.Series, s) {
				t.Errorf("%+v: no series %s", a, s)
			}
		}
	}
}

// allow replaces the allowances until the test ends.
func allow(t *testing.T, all ...allowance) {
	old := allowances
	allowances = all
	t.Cleanup(func() { allowances = old })
}

func TestAllowed(t *testing.T) {
	allow(t, allowance{pkg: "bpf", test: "TestA", reason: "too slow"}, allowance{pkg: "bpf", test: "TestB", reason: "older", series: []string{"5.10"}})
	for _, tc := range []struct {
		pkg, series, test, reason string
		want                      int
	}{
		{"bpf", "5.10", "TestA", "too slow for -short", 0},
		{"bpf", "6.1", "TestA/sub", "too slow", 0},
		{"bpf", "6.1", "TestAB", "too slow", -1},
		{"bpf", "6.1", "TestA", "needs the command x", -1},
		{"dispatch", "6.1", "TestA", "too slow", -1},
		{"bpf", "5.10", "TestB", "older than", 1},
		{"bpf", "6.1", "TestB", "older than", -1},
	} {
		if got := allowed(tc.pkg, tc.series, summary.Skip{Test: tc.test, Reason: tc.reason}); got != tc.want {
			t.Errorf("%+v: %d", tc, got)
		}
	}
}

// A table of all that can happen: tests that pass, fail, are skipped, an allowance that
// is not needed, a machine that fails, and a kernel that cannot be had.
func TestReport(t *testing.T) {
	kernel := &vmtest.Kernel{Release: "6.1.0-9-cloud-amd64"}
	good := &result{series: "6.1", kernel: kernel, suite: &suites[0], tests: summary.New(io.Discard)}
	good.tests.Passed, good.tests.Skipped = 7, 1
	good.tests.Skips = []summary.Skip{{Test: "TestS", Reason: "too slow"}}
	bad := &result{series: "6.1", kernel: kernel, suite: &suites[1], tests: summary.New(io.Discard)}
	bad.tests.Passed, bad.tests.Failed = 3, 2
	bad.output.WriteString("what failed")
	stale := &result{series: "6.1", kernel: kernel, suite: &suites[2], tests: summary.New(io.Discard), unused: []allowance{{test: "TestU", reason: "older"}}}
	dead := &result{series: "6.1", kernel: kernel, suite: &suites[3], tests: summary.New(io.Discard), err: errors.New("the kernel died")}
	missing := &result{series: "5.10", err: errors.New("Debian suite bullseye-security has no package")}
	var b strings.Builder
	if failed := report(&b, []*result{good, bad, stale, dead, missing}); failed != 5 {
		t.Errorf("%d failures, want 5", failed)
	}
	out := b.String()
	for _, want := range []string{
		"6.1     6.1.0-9-cloud-amd64 ", " 7/0/1", " 3/2/0", " 0/1/0", "\n5.10 ",
		"bpf TestS: too slow [6.1]\n",
		"====== FAIL: Linux 6.1.0-9-cloud-amd64, dispatch\nwhat failed",
		"not skipped, though TestU may be",
		"====== FAIL: Linux 6.1.0-9-cloud-amd64, handover\nthe kernel died\n",
		"====== FAIL: Linux 5.10\nDebian suite bullseye-security has no package\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	b.Reset()
	if failed := report(&b, []*result{good}); failed != 0 || strings.Contains(b.String(), "FAIL") {
		t.Errorf("%d failures in\n%s", failed, b.String())
	}
}

func TestArguments(t *testing.T) {
	for _, args := range [][]string{{"--jobs", "0"}, {"--jobs", "x"}, {"--what"}} {
		if code := run(t.Context(), args, io.Discard, io.Discard); code != 2 {
			t.Errorf("%q: exit code %d", args, code)
		}
	}
}
