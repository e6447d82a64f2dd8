// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"instar/dispatch"
)

// reportVersion counts changes of the JSON that a reader has to know of.
const reportVersion = 1

// Report is what a run found.
type Report struct {
	Version     int          `json:"version"`
	Machine     Machine      `json:"machine"`
	PacketCosts []PacketCost `json:"packet_costs"`
	Programs    []Program    `json:"programs"`
	Throughputs []Throughput `json:"throughputs"`
	Operations  []Operation  `json:"operations"`
	// Notes say what to think of before the numbers are used.
	Notes []string `json:"notes,omitempty"`
}

// What is to be reached: net nanoseconds of a packet, parts of plain SO_REUSEPORT's
// throughput, microseconds of operations.
const (
	goalRatio   = 0.98
	goalJoin256 = 10_000.0 // median
	goalFlip    = 50.0     // 99th percentile
)

// goals are by program and packets.
var goals = map[string]float64{
	"stateless/" + anyPackets:  40,
	"quic/" + ourPackets:       60,
	"flow/" + knownFlow:        100,
	"custom/" + classicPackets: 80,
}

// A result is called noisy when the middle half of its rounds is wider than this part
// of the median, and nanoseconds or ratios that differ by less are the same anyway.
const (
	noisyPart  = 0.2
	noisyNanos = 10.0
	noisyRatio = 0.05
)

// remark fills in the notes.
func (r *Report) remark() {
	note := func(format string, args ...any) { r.Notes = append(r.Notes, fmt.Sprintf(format, args...)) }
	if l := r.Machine.LoadStart; l > 0.5 {
		note("the load average was %.1f before the start: the machine is busy with something else, which makes every number worse", l)
	}
	for _, c := range r.PacketCosts {
		if w := c.Net.P75 - c.Net.P25; w > max(noisyPart*c.Net.Median, noisyNanos) {
			note("noisy: %s, %s: half of the rounds are in %.0f to %.0f ns", c.Program, c.Packets, c.Net.P25, c.Net.P75)
		}
	}
	for _, t := range r.Throughputs {
		if t.Ratio.P75-t.Ratio.P25 > noisyRatio {
			note("noisy: throughput of %s, %s: half of the rounds are in %.3f to %.3f", t.Program, t.Way, t.Ratio.P25, t.Ratio.P75)
		}
	}
	for _, c := range r.PacketCosts {
		if goal := goals[c.Program+"/"+c.Packets]; goal > 0 && c.Net.Median > goal {
			note("not reached: %s, %s: %.0f ns, and %.0f is the goal; selecting from an array alone takes %.0f of them here",
				c.Program, c.Packets, c.Net.Median, goal, r.PacketCosts[1].Net.Median)
		}
	}
	for _, t := range r.Throughputs {
		if t.Program != plainName && t.Program != emptyName && t.Ratio.Median < goalRatio {
			note("not reached: throughput of %s, %s: %.3f of plain SO_REUSEPORT, and %.2f is the goal", t.Program, t.Way, t.Ratio.Median, goalRatio)
		}
	}
	for _, o := range r.Operations {
		switch {
		case o.Name == joinName(dispatch.LimitWorkers) && o.P50 > goalJoin256:
			note("not reached: %s: median %.0f us, and %.0f is the goal", o.Name, o.P50, goalJoin256)
		case o.Name == flipName && o.P99 > goalFlip:
			note("not reached: %s: p99 %.0f us, and %.0f is the goal", o.Name, o.P99, goalFlip)
		}
	}
	if r.Machine.CPUs == 1 {
		note("there is one CPU: sender and receiving loop cannot be apart")
	}
}

// write prints the report for people.
func (r *Report) write(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	line := func(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }
	m := r.Machine
	line("Linux %s, %d x %s, %s, load average %.2f at the start and %.2f at the end", m.Kernel, m.CPUs, m.CPU, m.Go, m.LoadStart, m.LoadEnd)

	line("\nTIME OF A PACKET, ns\tpackets\tmedian\tmin\tmax\t")
	for i, c := range r.PacketCosts {
		less := ", net"
		if i == 0 {
			less = ", in all"
		}
		line("%s%s\t%s\t%.1f\t%.1f\t%.1f\t", c.Program, less, c.Packets, c.Net.Median, c.Net.Min, c.Net.Max)
	}
	line("\nPROGRAM\tinstructions verified\tbytes of machine code\t")
	for _, p := range r.Programs {
		line("%s\t%d\t%d\t", p.Name, p.Verified, p.JITed)
	}
	line("\nRECEIVED PACKETS/S\tCPUs\tplain SO_REUSEPORT\twith program\tratio\tmin\tmax\t")
	for _, t := range r.Throughputs {
		line("%s\t%s\t%.0f\t%.0f\t%.3f\t%.3f\t%.3f\t", t.Program, t.Way, t.Plain.Median, t.With.Median, t.Ratio.Median, t.Ratio.Min, t.Ratio.Max)
	}
	line("\nOPERATION, us\ttimes\tmedian\tp99\tmax\t")
	for _, o := range r.Operations {
		line("%s\t%d\t%s\t%s\t%s\t", o.Name, o.Count, micros(o.P50), micros(o.P99), micros(o.Max))
	}
	if len(r.Notes) > 0 {
		line("")
	}
	for _, n := range r.Notes {
		line("note: %s", n)
	}
	return w.Flush()
}

// micros shows microseconds with as many digits as mean something.
func micros(us float64) string {
	switch {
	case us < 1:
		return fmt.Sprintf("%.3f", us)
	case us < 100:
		return fmt.Sprintf("%.1f", us)
	default:
		return fmt.Sprintf("%.0f", us)
	}
}
