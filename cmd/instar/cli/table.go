// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// Colours of whole rows; a row keeps its width, so columns stay aligned.
const (
	colourNone   = ""
	colourGreen  = "\x1b[32m"
	colourYellow = "\x1b[33m"
	colourFaint  = "\x1b[2m"
	colourReset  = "\x1b[0m"
)

// table is rows of aligned columns.
type table struct {
	rows    [][]string
	colours []string
}

func (t *table) add(colour string, cells ...string) {
	t.rows = append(t.rows, cells)
	t.colours = append(t.colours, colour)
}

// write prints the table; right lists the columns that are numbers.
func (t *table) write(w io.Writer, colours bool) error {
	var buf bytes.Buffer
	tw := tabwriter.NewWriter(&buf, 0, 8, 2, ' ', 0)
	for _, row := range t.rows {
		fmt.Fprintln(tw, strings.Join(row, "\t"))
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	for i, line := range strings.Split(strings.TrimSuffix(buf.String(), "\n"), "\n") {
		line = strings.TrimRight(line, " ")
		if colours && t.colours[i] != colourNone {
			line = t.colours[i] + line + colourReset
		}
		if _, err := fmt.Fprintln(w, line); err != nil {
			return fmt.Errorf("write table: %w", err)
		}
	}
	return nil
}

// dash stands in for what does not exist.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// span writes a duration the way people say it: two significant units at most.
func span(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	default:
		return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
	}
}

// ago says how long before now t was.
func ago(now, t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return span(now.Sub(t)) + " ago"
}

// until counts down to t.
func until(now, t time.Time) string {
	switch {
	case t.IsZero():
		return "-"
	case !t.After(now):
		return "over"
	default:
		return "in " + span(t.Sub(now))
	}
}
