// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"instar/quicdemo"
)

// row is one measure of all runs.
type row struct {
	Name  string
	Cells []cell
}

type cell struct {
	Value string
	Bad   bool
}

// compare lists the runs side by side.
func compare(r *Report) (columns []string, rows []row) {
	for i := range r.Runs {
		columns = append(columns, string(r.Runs[i].Method))
	}
	add := func(name string, loss bool, value func(*Result) int64) {
		line := row{Name: name}
		for i := range r.Runs {
			n := value(&r.Runs[i])
			line.Cells = append(line.Cells, cell{Value: group(n), Bad: loss && n > 0})
		}
		rows = append(rows, line)
	}
	add("upgrades", false, func(r *Result) int64 { return int64(r.Upgrades) })
	add("connections", false, func(r *Result) int64 { return r.Connections })
	add("requests", false, func(r *Result) int64 { return r.Requests })
	add("failed requests", true, func(r *Result) int64 { return r.FailedRequests })
	add("failed handshakes", true, func(r *Result) int64 { return r.FailedHandshakes })
	add("broken connections", true, func(r *Result) int64 { return r.BrokenConnections })
	add("failed migrations", true, func(r *Result) int64 { return r.FailedMigrations })
	add("failed servers", true, func(r *Result) int64 { return int64(r.ServerFailures) })
	add("migrations", false, func(r *Result) int64 { return r.Migrations })
	add("NAT rebindings", false, func(r *Result) int64 { return r.Rebinds })
	add("moved by GOAWAY", false, func(r *Result) int64 { return r.Moved })
	add("requests retried", false, func(r *Result) int64 { return r.Retried })
	add("sessions resumed", false, func(r *Result) int64 { return r.Resumed })
	add("of them with 0-RTT", false, func(r *Result) int64 { return r.ZeroRTT.Accepted })
	downloaded := row{Name: "downloaded"}
	for i := range r.Runs {
		downloaded.Cells = append(downloaded.Cells, cell{Value: size(r.Runs[i].Bytes)})
	}
	rows = append(rows, downloaded)
	for _, what := range []struct {
		name string
		of   func(*Result) quicdemo.Latency
	}{
		{"handshake", func(r *Result) quicdemo.Latency { return r.Handshake }},
		{"request", func(r *Result) quicdemo.Latency { return r.Request }},
	} {
		lines := []row{{Name: what.name + " p50"}, {Name: what.name + " p99"}, {Name: what.name + " max"}}
		for i := range r.Runs {
			l := what.of(&r.Runs[i])
			for k, ms := range []float64{l.P50, l.P99, l.Max} {
				lines[k].Cells = append(lines[k].Cells, cell{Value: milliseconds(ms)})
			}
		}
		rows = append(rows, lines...)
	}
	return columns, rows
}

// WriteTable writes the report for people.
func WriteTable(w io.Writer, r *Report) error {
	tw := tabwriter.NewWriter(w, 0, 8, 3, ' ', tabwriter.AlignRight)
	columns, rows := compare(r)
	// The first column has to be on the left, and AlignRight is for all: it is
	// padded by hand.
	width := 0
	for _, row := range rows {
		width = max(width, len(row.Name))
	}
	fmt.Fprintf(tw, "%-*s\t%s\t\n", width, "", strings.Join(columns, "\t"))
	for _, row := range rows {
		values := make([]string, 0, len(row.Cells))
		for _, c := range row.Cells {
			values = append(values, c.Value)
		}
		fmt.Fprintf(tw, "%-*s\t%s\t\n", width, row.Name, strings.Join(values, "\t"))
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	for i := range r.Runs {
		run := &r.Runs[i]
		if len(run.Errors) > 0 || len(run.Problems) > 0 {
			fmt.Fprintf(w, "\n%s:\n", run.Method)
		}
		for _, kind := range slices.Sorted(maps.Keys(run.Errors)) {
			fmt.Fprintf(w, "  %s x %s\n", group(run.Errors[kind]), kind)
		}
		for _, p := range run.Problems {
			fmt.Fprintf(w, "  %s\n", p)
		}
	}
	fmt.Fprintln(w)
	for i := range r.Runs {
		run, found := &r.Runs[i], ""
		if i == 0 {
			found = strings.ToLower(verdict(run))
		}
		if run.Interrupted {
			if found != "" {
				found = ", " + found + " until then"
			}
			found = fmt.Sprintf("interrupted after %.1f s%s", run.Seconds, found)
		}
		if found == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%s: %s.\n", run.Method, found); err != nil {
			return err
		}
	}
	return nil
}

// group writes a number with commas between its thousands.
func group[T int64 | uint64](n T) string {
	s := strconv.FormatInt(int64(n), 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func plural(n int64, what string) string {
	if n != 1 {
		what += "s"
	}
	return group(n) + " " + what
}

// size writes a number of bytes.
func size(n int64) string {
	switch {
	case n < 10<<10:
		return group(n) + " B"
	case n < 10<<20:
		return fmt.Sprintf("%d KiB", n>>10)
	case n < 10<<30:
		return fmt.Sprintf("%d MiB", n>>20)
	default:
		return fmt.Sprintf("%d GiB", n>>30)
	}
}

func milliseconds(ms float64) string {
	if ms < 100 {
		return fmt.Sprintf("%.1f ms", ms)
	}
	return fmt.Sprintf("%.0f ms", ms)
}

func times(n int) string {
	switch n {
	case 1:
		return "once"
	case 2:
		return "twice"
	default:
		return fmt.Sprintf("%d times", n)
	}
}
