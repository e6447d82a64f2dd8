// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"sync"
	"syscall"
	"time"

	"instar/internal/content"
	"instar/internal/latency"
)

// Kind is a kind of client.
type Kind string

const (
	// KindNew is a connection for one short request.
	KindNew Kind = "new"
	// KindKeepAlive is a connection that stays, with requests now and then.
	KindKeepAlive Kind = "keepalive"
	// KindLong is a connection for one long response.
	KindLong Kind = "long"
)

// Counts is what became of some connections and requests.
type Counts struct {
	// Connections were opened.
	Connections int64 `json:"connections"`
	// Requests were answered in full, with the right content.
	Requests int64 `json:"requests"`
	// Refused counts attempts to connect that got ECONNREFUSED.
	Refused int64 `json:"refused"`
	// Reset counts connections that were reset while they were made, or before a
	// byte of the response.
	Reset int64 `json:"reset"`
	// Cut counts responses that ended too early, those with no byte included.
	Cut int64 `json:"cut"`
	// Timeout counts attempts to connect and requests that took too long.
	Timeout int64 `json:"timeout"`
	// Wrong counts responses with another status or content.
	Wrong int64 `json:"wrong"`
	// Other counts failures of another sort.
	Other int64 `json:"other"`
	// Lost is the sum of Refused, Reset, Cut, Timeout, Wrong and Other.
	Lost int64 `json:"lost"`
}

func (c *Counts) add(l loss) {
	c.Lost++
	switch l {
	case refused:
		c.Refused++
	case reset:
		c.Reset++
	case cut:
		c.Cut++
	case timedOut:
		c.Timeout++
	case wrong:
		c.Wrong++
	default:
		c.Other++
	}
}

// Result is what a Load found.
type Result struct {
	Seconds float64 `json:"seconds"`
	Counts
	// Kinds and Generations divide the same counts. The generation of a failure
	// is the one that answered on the connection, 0 when none did.
	Kinds       map[Kind]Counts `json:"kinds"`
	Generations map[int]Counts  `json:"generations"`

	// ToldToClose counts keep-alive connections that the server asked to close
	// ("Connection: close"), ClosedIdle those that it closed while nothing was
	// asked. Each goes on as a new connection; nothing is lost.
	ToldToClose int64 `json:"told_to_close"`
	ClosedIdle  int64 `json:"closed_idle"`
	// Raced counts requests on connections that the server closed at that very
	// moment. They were sent again on a new connection, as HTTP/1.1 has it.
	Raced int64 `json:"raced"`
	// Skipped counts new connections that this process was too slow to open.
	Skipped int64 `json:"skipped"`

	// Connect is the time of connecting, Request that from sending a request to
	// the first byte of its response.
	Connect latency.Summary `json:"connect_ms"`
	Request latency.Summary `json:"request_ms"`

	// Examples are the first few losses.
	Examples []string `json:"examples,omitempty"`
}

// maxExamples is how many losses a result describes.
const maxExamples = 5

// Answer is a response that came in full.
type Answer struct {
	Kind       Kind
	Generation int
	PID        int
	Bytes      int64
	// Connected is when the client began to connect, Began when it sent the
	// request, Ended when it had the response.
	Connected, Began, Ended time.Time
}

// recorder collects a Result.
type recorder struct {
	began    time.Time
	answered func(Answer)

	mu      sync.Mutex
	result  Result
	connect latency.Reservoir
	request latency.Reservoir
}

func newRecorder(answered func(Answer)) *recorder {
	return &recorder{
		began:    time.Now(),
		answered: answered,
		result:   Result{Kinds: map[Kind]Counts{}, Generations: map[int]Counts{}},
	}
}

// count changes the counts of the kind, of the generation and of all.
func (r *recorder) count(k Kind, generation int, change func(*Counts)) {
	change(&r.result.Counts)
	of := r.result.Kinds[k]
	change(&of)
	r.result.Kinds[k] = of
	by := r.result.Generations[generation]
	change(&by)
	r.result.Generations[generation] = by
}

func (r *recorder) connected(k Kind, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// Who accepted it is known with the first answer only.
	r.result.Connections++
	of := r.result.Kinds[k]
	of.Connections++
	r.result.Kinds[k] = of
	r.connect.Add(took)
}

// answer records a success; first says that it is the connection's first.
func (r *recorder) answer(a Answer, first bool, took time.Duration) {
	r.mu.Lock()
	r.count(a.Kind, a.Generation, func(c *Counts) { c.Requests++ })
	if first {
		by := r.result.Generations[a.Generation]
		by.Connections++
		r.result.Generations[a.Generation] = by
	}
	r.request.Add(took)
	r.mu.Unlock()
	if r.answered != nil {
		r.answered(a)
	}
}

func (r *recorder) lost(k Kind, generation int, what string, err error) {
	l := classify(err)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count(k, generation, func(c *Counts) { c.add(l) })
	if len(r.result.Examples) < maxExamples {
		r.result.Examples = append(r.result.Examples,
			fmt.Sprintf("%.3f s, %s, %s: %s: %v", time.Since(r.began).Seconds(), k, what, l, err))
	}
}

// update changes the result under the lock.
func (r *recorder) update(change func(*Result)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&r.result)
}

// sums are the requests and losses so far.
func (r *recorder) sums() (requests, lost int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.result.Requests, r.result.Lost
}

// snapshot is the result so far.
func (r *recorder) snapshot() Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.result
	s.Seconds = time.Since(r.began).Seconds()
	s.Kinds, s.Generations = maps.Clone(s.Kinds), maps.Clone(s.Generations)
	s.Examples = append([]string(nil), s.Examples...)
	s.Connect, s.Request = r.connect.Summary(), r.request.Summary()
	return s
}

// loss is how something was lost.
type loss string

const (
	refused  loss = "refused"
	reset    loss = "reset"
	cut      loss = "cut"
	timedOut loss = "timeout"
	wrong    loss = "wrong"
	other    loss = "other"
)

var (
	// errCut is the end of a connection before the end of a response.
	errCut = errors.New("response ended early")
	// errWrong is a response that is not what was asked for.
	errWrong = errors.New("wrong response")
)

func classify(err error) loss {
	var timeout interface{ Timeout() bool }
	switch {
	case errors.Is(err, errCut):
		return cut
	case errors.Is(err, errWrong), errors.Is(err, content.ErrCorrupt):
		return wrong
	case errors.Is(err, syscall.ECONNREFUSED):
		return refused
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return reset
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return timedOut
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return cut
	}
	return other
}
