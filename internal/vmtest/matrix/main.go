// SPDX-License-Identifier: Apache-2.0

// Command matrix is scripts/test-kernels: it runs the tests that depend on the kernel
// under each kernel of the project, in virtual machines, and prints one table.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"instar/internal/debian"
	"instar/internal/kerneltest"
	"instar/internal/vmtest"
)

const usage = `usage: scripts/test-kernels [--jobs N] [SERIES...]
       scripts/test-kernels --doc

Runs the kernel-facing tests in virtual machines, on all kernels of the project or on
those named (6.1, newest), and prints a table, why tests were skipped, and failures in
full. A test may be skipped only where internal/vmtest/matrix/allow.go says so; anything
else, and a kernel that cannot be had, is a failure. The exit code is 1 when there is
one. With --doc it writes docs/kernels.md.

FLAGS
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("test-kernels", flag.ContinueOnError)
	flags.SetOutput(stderr)
	jobs := flags.Int("jobs", 2, "virtual machines at a time")
	doc := flags.Bool("doc", false, "write docs/kernels.md")
	flags.Usage = func() {
		fmt.Fprint(stderr, usage)
		flags.PrintDefaults()
	}
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}
	if *jobs < 1 {
		fmt.Fprintln(stderr, "test-kernels: --jobs has to be 1 or more")
		return 2
	}
	if *doc {
		if err := os.WriteFile(document, []byte(kerneltest.Document()), 0o644); err != nil {
			fmt.Fprintln(stderr, "test-kernels:", err)
			return 1
		}
		return 0
	}
	series := flags.Args()
	if len(series) == 0 {
		series = vmtest.Series
	}
	began := time.Now()
	results, err := runAll(ctx, series, *jobs, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "test-kernels:", err)
		return 1
	}
	failed := report(stdout, results)
	fmt.Fprintf(stdout, "\n%d machines in %v\n", len(results), time.Since(began).Round(time.Second))
	if failed > 0 || ctx.Err() != nil {
		return 1
	}
	return 0
}

// document is where the table of features is, from the root of the module, where the
// script starts this program.
const document = "docs/kernels.md"

// runAll runs every suite under every kernel, the longest first.
func runAll(ctx context.Context, series []string, jobs int, log io.Writer) ([]*result, error) {
	store, err := debian.OpenStore(log)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "test-kernels-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	built, err := build(ctx, dir)
	if err != nil {
		return nil, err
	}
	var results []*result
	for _, s := range series {
		k, err := vmtest.Find(ctx, store, s)
		if err == nil {
			err = k.Fetch(ctx, store)
		}
		if err != nil {
			results = append(results, &result{series: s, err: err})
			continue
		}
		for i := range suites {
			results = append(results, &result{series: s, kernel: k, suite: &suites[i]})
		}
	}
	work := slices.Clone(results)
	slices.SortStableFunc(work, func(a, b *result) int { return weight(b) - weight(a) })
	queue := make(chan *result)
	var workers sync.WaitGroup
	for range jobs {
		workers.Go(func() {
			for r := range queue {
				r.run(ctx, built)
				fmt.Fprintln(log, r.line())
			}
		})
	}
	for _, r := range work {
		if r.kernel != nil {
			queue <- r
		}
	}
	close(queue)
	workers.Wait()
	return results, nil
}

func weight(r *result) int {
	if r.suite == nil {
		return 0
	}
	return r.suite.weight
}

// programs are what was built once for all machines.
type programs struct {
	guest    string
	tests    map[string]string // by package
	testdata map[string]string
}

func build(ctx context.Context, dir string) (programs, error) {
	p := programs{tests: map[string]string{}}
	var err error
	if p.testdata, err = vmtest.Testdata("."); err != nil {
		return p, err
	}
	if p.guest, err = vmtest.BuildGuest(ctx, ".", dir); err != nil {
		return p, err
	}
	for i, s := range suites {
		path := filepath.Join(dir, fmt.Sprintf("%d", i), filepath.Base(s.pkg)+".test")
		if err := vmtest.Build(ctx, ".", "test", path, "./"+s.pkg); err != nil {
			return p, err
		}
		p.tests[s.pkg] = path
	}
	return p, nil
}
