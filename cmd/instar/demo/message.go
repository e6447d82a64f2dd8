// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"encoding/json"
	"io"
	"sync"
	"time"
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
	Event  *Event    `json:"event,omitempty"`
	Status *Status   `json:"status,omitempty"`
	Report *document `json:"report,omitempty"`
	Fail   *failure  `json:"fail,omitempty"`
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

// failure is an error that ends the demo before there is a whole report.
type failure struct {
	Text string `json:"text"`
	// Environment says that the machine lacks something.
	Environment bool `json:"environment,omitempty"`
}

// sender writes messages; it may be used from several goroutines.
type sender struct {
	mu  sync.Mutex
	enc *json.Encoder
}

func newSender(w io.Writer) *sender { return &sender{enc: json.NewEncoder(w)} }

// send writes one line. A command that is gone cannot be told anything: the
// sandbox learns of it by a signal, so an error here says nothing new.
func (s *sender) send(m message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.enc.Encode(m)
}
