// SPDX-License-Identifier: Apache-2.0

// Package job is what a virtual machine is told and what it reports: the agreement
// between package vmtest and its guest.
package job

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Where things are in the guest.
const (
	// Path has the Job, in JSON.
	Path = "/job.json"
	// Console, Output and Status are the serial ports: for the kernel and the guest,
	// for the program, and for the Report.
	Console = "/dev/ttyS0"
	Output  = "/dev/ttyS1"
	Status  = "/dev/ttyS2"
)

// Job is a program to run.
type Job struct {
	Args    []string // the program's path first
	Env     []string
	Dir     string
	Modules []string // files with kernel modules, in the order in which they are loaded
}

// Report is what is known of a run.
type Report struct {
	Started bool // the program was started
	Ended   bool
	Code    int    // its exit code; 128 and the number of the signal that ended it
	Error   string // why it was not started
}

// Lines of a report.
const (
	started = "started"
	ended   = "ended "
	failed  = "failed "
)

// Starting reports that the program was started.
func Starting(w io.Writer) { fmt.Fprintln(w, started) }

// Ending reports the exit code.
func Ending(w io.Writer, code int) { fmt.Fprintln(w, ended+strconv.Itoa(code)) }

// Failing reports why the program was not started.
func Failing(w io.Writer, err error) {
	fmt.Fprintln(w, failed+strings.ReplaceAll(err.Error(), "\n", " "))
}

// ReadReport reads a report, of which the end may be missing.
func ReadReport(r io.Reader) (Report, error) {
	var report Report
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		line := strings.TrimSuffix(lines.Text(), "\r")
		switch {
		case line == started:
			report.Started = true
		case strings.HasPrefix(line, ended):
			code, err := strconv.Atoi(strings.TrimPrefix(line, ended))
			if err != nil {
				return report, fmt.Errorf("read report of the guest: %w", err)
			}
			report.Ended, report.Code = true, code
		case strings.HasPrefix(line, failed):
			report.Error = strings.TrimPrefix(line, failed)
		default:
			return report, fmt.Errorf("read report of the guest: unknown line %q", line)
		}
	}
	if err := lines.Err(); err != nil {
		return report, fmt.Errorf("read report of the guest: %w", err)
	}
	return report, nil
}
