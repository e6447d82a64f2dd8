// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"instar/internal/sandbox"
)

// Options say what to run. The zero value is the default demonstration.
type Options struct {
	// Upgrades is how often the gateway is replaced. Default 5, at most 50.
	Upgrades int `json:"upgrades"`
	// Peers is how many peers stay; one more comes and goes. Default 4, at most 50.
	Peers int `json:"peers"`
}

// Defaults of Options.
const (
	DefaultUpgrades = 5
	DefaultPeers    = 4
)

// WithDefaults fills in what is zero and checks the rest.
func (o Options) WithDefaults() (Options, error) {
	o.Upgrades = cmp.Or(o.Upgrades, DefaultUpgrades)
	o.Peers = cmp.Or(o.Peers, DefaultPeers)
	var errs []error
	if o.Upgrades < 1 || o.Upgrades > 50 {
		errs = append(errs, fmt.Errorf("upgrades: %d is not in 1 to 50", o.Upgrades))
	}
	if o.Peers < 1 || o.Peers > 50 {
		errs = append(errs, fmt.Errorf("peers: %d is not in 1 to 50", o.Peers))
	}
	return o, errors.Join(errs...)
}

// Report is what the demonstration found.
type Report struct {
	Started time.Time    `json:"started"`
	Options Options      `json:"options"`
	Host    sandbox.Host `json:"host"`
	Runs    []Result     `json:"runs"`
}

// Result is one run.
type Result struct {
	Method   string `json:"method"`
	Upgrades int    `json:"upgrades"`
	// Counts is what the peers saw.
	Counts
	// MovedMS is how long it took, in each upgrade, from when new handshakes came to the new
	// process until all peers that stay had one with it; LeaveMS until the old process had
	// ended. The probation is part of that.
	MovedMS []int64 `json:"moved_ms"`
	LeaveMS []int64 `json:"leave_ms"`
	// Problems are what went wrong besides losses.
	Problems []string `json:"problems,omitempty"`
}

// OK says that nothing was lost and nothing went wrong.
func (r *Result) OK() bool {
	return r.Lost() == 0 && len(r.Problems) == 0 && r.InnerPackets > 0 && r.Handshakes > 0 && r.TCPBytes > 0
}

// Failed says what is wrong with a run.
func (r *Result) Failed() string {
	var wrong []string
	if r.Lost() > 0 {
		wrong = append(wrong, fmt.Sprintf("lost %d: %d inner packets, %d handshakes, %d TCP connections",
			r.Lost(), r.LostInnerPackets, r.FailedHandshakes, r.TCPBroken))
	} else if !r.OK() && len(r.Problems) == 0 {
		wrong = append(wrong, "there was no traffic")
	}
	return strings.Join(append(wrong, r.Problems...), "; ")
}

// WriteTable writes the report for people.
func WriteTable(w io.Writer, r *Report) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(name string, cell func(*Result) string) {
		fmt.Fprintf(t, "%s\t", name)
		for i := range r.Runs {
			fmt.Fprintf(t, "%s\t", cell(&r.Runs[i]))
		}
		fmt.Fprintln(t)
	}
	number := func(name string, of func(*Result) int64) {
		row(name, func(r *Result) string { return group(of(r)) })
	}
	row("", func(r *Result) string { return r.Method })
	number("upgrades", func(r *Result) int64 { return int64(r.Upgrades) })
	number("inner packets", func(r *Result) int64 { return r.InnerPackets })
	number("lost inner packets", func(r *Result) int64 { return r.LostInnerPackets })
	number("new handshakes", func(r *Result) int64 { return r.Handshakes })
	number("failed handshakes", func(r *Result) int64 { return r.FailedHandshakes })
	number("TCP bytes there and back", func(r *Result) int64 { return r.TCPBytes })
	number("broken TCP connections", func(r *Result) int64 { return r.TCPBroken })
	for _, q := range []struct {
		name string
		of   func(*Result) float64
	}{
		{"echo p50", func(r *Result) float64 { return r.Echo.P50 }},
		{"echo p99", func(r *Result) float64 { return r.Echo.P99 }},
		{"echo max", func(r *Result) float64 { return r.Echo.Max }},
		{"handshake p50", func(r *Result) float64 { return r.Handshake.P50 }},
		{"handshake max", func(r *Result) float64 { return r.Handshake.Max }},
	} {
		row(q.name, func(r *Result) string { return strconv.FormatFloat(q.of(r), 'f', 1, 64) + " ms" })
	}
	row("peers moved after, at most", func(r *Result) string { return longest(r.MovedMS) })
	row("old process ended after, at most", func(r *Result) string { return longest(r.LeaveMS) })
	if err := t.Flush(); err != nil {
		return err
	}
	for i := range r.Runs {
		result := &r.Runs[i]
		for _, text := range append(result.Problems, result.Examples...) {
			fmt.Fprintf(w, "%s: %s\n", result.Method, text)
		}
	}
	return nil
}

func longest(ms []int64) string {
	var most int64
	for _, n := range ms {
		most = max(most, n)
	}
	return group(most) + " ms"
}

// group writes a number with a comma between groups of three digits.
func group(n int64) string {
	text := strconv.FormatInt(n, 10)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
