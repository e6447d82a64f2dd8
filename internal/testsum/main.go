// SPDX-License-Identifier: Apache-2.0

// Command testsum runs go test and says what happened: a line for each
// package, failures in full, skipped tests with their reasons, and at the end
// "N passed, N failed, N skipped". Its arguments are those of go test.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"instar/internal/testsum/summary"
)

func main() {
	code, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
	}
	os.Exit(code)
}

func run(args []string) (int, error) {
	cmd := exec.Command("go", append([]string{"test", "-json"}, withPackages(args)...)...)
	var messages bytes.Buffer // of the go command itself
	cmd.Stderr = &messages
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return 1, err
	}
	if err := cmd.Start(); err != nil {
		return 1, err
	}
	s := summary.New(os.Stdout)
	s.Verbose = slices.Contains(args, "-v")
	if os.Getenv("INSTAR_TEST_NO_SKIP") == "1" {
		s.Refuse = summary.Unprivileged
	}
	readErr := s.Read(stdout)
	waitErr := cmd.Wait()
	if exit := (*exec.ExitError)(nil); waitErr != nil && !errors.As(waitErr, &exit) {
		return 1, waitErr
	}
	succeeded := waitErr == nil
	if messages.Len() > 0 {
		fmt.Fprintf(os.Stdout, "\n%s", messages.Bytes())
	}
	s.Finish(!succeeded)
	if readErr != nil || !succeeded || s.Failed > 0 {
		return 1, readErr
	}
	return 0, nil
}

// withPackages adds ./... when args name no package. Flags that take their
// value as a word of its own have to be known for that.
func withPackages(args []string) []string {
	valued := map[string]bool{
		"run": true, "skip": true, "bench": true, "benchtime": true, "count": true, "cpu": true,
		"parallel": true, "p": true, "timeout": true, "tags": true, "exec": true, "fuzz": true,
		"fuzztime": true, "fuzzminimizetime": true, "shuffle": true, "list": true, "vet": true,
		"coverprofile": true, "covermode": true, "coverpkg": true, "cpuprofile": true,
		"memprofile": true, "blockprofile": true, "mutexprofile": true, "trace": true,
		"outputdir": true, "o": true, "mod": true, "modfile": true, "ldflags": true, "gcflags": true,
		"asmflags": true, "overlay": true, "pgo": true, "C": true,
	}
	for i := 0; i < len(args); i++ {
		switch flag := strings.TrimLeft(args[i], "-"); {
		case args[i] == "-args" || args[i] == "--args":
			return slices.Insert(slices.Clone(args), i, "./...")
		case flag == args[i]:
			return args // a package
		case valued[flag]:
			i++
		}
	}
	return append(slices.Clone(args), "./...")
}
