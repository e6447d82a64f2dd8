// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"time"

	"instar/internal/sandbox"
)

// Event is something that happened, for a line of progress.
type Event struct {
	Method Method        `json:"method"`
	At     time.Duration `json:"at"`
	Text   string        `json:"text"`
	// Bad marks what counts as a failure.
	Bad bool `json:"bad,omitempty"`
}

// Status is how the run is going, ten times a second.
type Status struct {
	Method   Method        `json:"method"`
	At       time.Duration `json:"at"`
	Of       time.Duration `json:"of"`
	Active   uint32        `json:"active"`
	Servers  int           `json:"servers"`
	Requests int64         `json:"requests"`
	Failures int64         `json:"failures"`
}

// message is one line from the sandbox to the command: one field is set.
type message struct {
	Event  *Event           `json:"event,omitempty"`
	Status *Status          `json:"status,omitempty"`
	Report *document        `json:"report,omitempty"`
	Fail   *sandbox.Failure `json:"fail,omitempty"`
}

// document is a report with its timelines, one a run.
type document struct {
	Report
	Timelines [][]Sample `json:"timelines"`
}

func newDocument(r Report) *document {
	d := &document{Report: r}
	for _, run := range r.Runs {
		d.Timelines = append(d.Timelines, run.Timeline)
	}
	return d
}

func (d *document) report() Report {
	r := d.Report
	for i := range r.Runs {
		if i < len(d.Timelines) {
			r.Runs[i].Timeline = d.Timelines[i]
		}
	}
	return r
}
