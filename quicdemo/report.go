// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"instar/internal/content"
	"instar/internal/latency"
)

// Result is what a run of Load found.
type Result struct {
	// Seconds is how long the run took.
	Seconds float64 `json:"seconds"`
	// Connections counts the handshakes that were completed.
	Connections int64 `json:"connections"`
	// Requests counts the requests that were answered in full, every byte as it
	// should be.
	Requests int64 `json:"requests"`
	// Generations counts these requests by the generation that answered.
	Generations map[uint32]int64 `json:"generations"`
	// Bytes counts the bytes of all bodies.
	Bytes int64 `json:"bytes"`

	// FailedHandshakes, FailedRequests and BrokenConnections count losses. A
	// connection that breaks under a request counts in both of the latter.
	FailedHandshakes  int64 `json:"failed_handshakes"`
	FailedRequests    int64 `json:"failed_requests"`
	BrokenConnections int64 `json:"broken_connections"`

	// Migrations counts active connection migrations, Rebinds changes of the
	// port without one. FailedMigrations were not answered on the new path.
	Migrations       int64 `json:"migrations"`
	Rebinds          int64 `json:"rebinds"`
	FailedMigrations int64 `json:"failed_migrations"`
	// Moved counts persistent connections that the server sent away in good
	// order (GOAWAY, H3_NO_ERROR) and that went on as a new connection.
	Moved int64 `json:"moved"`
	// Retried counts requests that the server did not process because of
	// GOAWAY, and that were sent again (RFC 9114 section 5.2).
	Retried int64 `json:"retried"`
	// Resumed counts connections that resumed a TLS session.
	Resumed int64 `json:"resumed"`
	// ZeroRTT counts connections with early data.
	ZeroRTT ZeroRTT `json:"zero_rtt"`

	// Stall is by how much this process was late at most to look at its clock,
	// in milliseconds. Latencies and timeouts of that order are the machine's.
	Stall float64 `json:"stall_ms"`

	Handshake Latency `json:"handshake_ms"`
	Request   Latency `json:"request_ms"`

	// Errors counts the losses by what was lost and why, for example
	// "request: stateless_reset".
	Errors map[string]int64 `json:"errors"`
	// Examples are the first few losses.
	Examples []Loss `json:"examples"`
}

// ZeroRTT counts connections with early data.
type ZeroRTT struct {
	Attempted int64 `json:"attempted"`
	Accepted  int64 `json:"accepted"`
}

// Latency is in milliseconds.
type Latency = latency.Summary

// Loss is one loss.
type Loss struct {
	At   time.Time `json:"at"`
	Kind string    `json:"kind"`
	Text string    `json:"text"`
}

// Sample is what happened in 100 ms.
type Sample struct {
	// At is the end of these 100 ms, counted from the start of the run.
	At time.Duration `json:"at"`
	// Requests counts answered requests by generation.
	Requests map[uint32]int `json:"requests"`
	// Handshakes counts completed handshakes.
	Handshakes int `json:"handshakes"`
	// Failures counts losses of every kind.
	Failures int `json:"failures"`
	// Moved counts persistent connections that were sent away, Open those that
	// are open now.
	Moved int `json:"moved"`
	Open  int `json:"open"`
}

// Lost is the number of losses of every kind.
func (r *Result) Lost() int64 {
	return r.FailedHandshakes + r.FailedRequests + r.BrokenConnections + r.FailedMigrations
}

// String is the report for people.
func (r *Result) String() string {
	var b strings.Builder
	row := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-20s %s\n", name, fmt.Sprintf(format, args...))
	}
	row("duration", "%.1f s", r.Seconds)
	row("connections", "%d (%d resumed, 0-RTT %d of %d accepted)", r.Connections, r.Resumed, r.ZeroRTT.Accepted, r.ZeroRTT.Attempted)
	row("requests", "%d, %.1f MB", r.Requests, float64(r.Bytes)/1e6)
	for _, g := range slices.Sorted(maps.Keys(r.Generations)) {
		row(fmt.Sprintf("  generation %d", g), "%d", r.Generations[g])
	}
	row("moved by GOAWAY", "%d connections, %d requests sent again", r.Moved, r.Retried)
	row("port changes", "%d migrations, %d rebinds", r.Migrations, r.Rebinds)
	row("handshake", "p50 %.1f ms, p99 %.1f ms, max %.1f ms", r.Handshake.P50, r.Handshake.P99, r.Handshake.Max)
	row("request", "p50 %.1f ms, p99 %.1f ms, max %.1f ms", r.Request.P50, r.Request.P99, r.Request.Max)
	row("clock was late by", "%.0f ms at most", r.Stall)
	row("lost", "%d", r.Lost())
	if r.Lost() > 0 {
		row("  handshakes", "%d", r.FailedHandshakes)
		row("  requests", "%d", r.FailedRequests)
		row("  connections", "%d", r.BrokenConnections)
		row("  migrations", "%d", r.FailedMigrations)
	}
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		fmt.Fprintf(&b, "  %s: %d\n", kind, r.Errors[kind])
	}
	for _, e := range r.Examples {
		fmt.Fprintf(&b, "  %s %s: %s\n", e.At.Format("15:04:05.000"), e.Kind, e.Text)
	}
	return b.String()
}

// maxExamples is how many losses a result describes.
const maxExamples = 10

// recorder collects a Result.
type recorder struct {
	mu         sync.Mutex
	result     Result
	handshakes latency.Reservoir
	requests   latency.Reservoir
	window     Sample
}

func newRecorder() *recorder {
	return &recorder{
		result: Result{Generations: map[uint32]int64{}, Errors: map[string]int64{}, Examples: []Loss{}},
		window: Sample{Requests: map[uint32]int{}},
	}
}

// update changes the result under the lock.
func (r *recorder) update(change func(*Result)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&r.result)
}

func (r *recorder) handshake(took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result.Connections++
	r.window.Handshakes++
	r.handshakes.Add(took)
}

// request records a success; took 0 is left out of the latencies.
func (r *recorder) request(generation uint32, bytes int64, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result.Requests++
	r.result.Generations[generation]++
	r.result.Bytes += bytes
	r.window.Requests[generation]++
	if took > 0 {
		r.requests.Add(took)
	}
}

// opened counts persistent connections that opened, or closed when n is negative.
func (r *recorder) opened(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.window.Open += n
}

func (r *recorder) moved() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result.Moved++
	r.window.Moved++
}

// What can be lost.
const (
	lostHandshake  = "handshake"
	lostRequest    = "request"
	lostConnection = "connection"
	lostMigration  = "migration"
)

// lost records a loss.
func (r *recorder) lost(what string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch what {
	case lostHandshake:
		r.result.FailedHandshakes++
	case lostRequest:
		r.result.FailedRequests++
	case lostConnection:
		r.result.BrokenConnections++
	case lostMigration:
		r.result.FailedMigrations++
	}
	r.window.Failures++
	kind := what + ": " + classify(err)
	r.result.Errors[kind]++
	if len(r.result.Examples) < maxExamples {
		r.result.Examples = append(r.result.Examples, Loss{time.Now(), kind, err.Error()})
	}
}

// sample returns the window and starts the next one.
func (r *recorder) sample(at time.Duration) Sample {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.window
	s.At = at
	r.window = Sample{Requests: map[uint32]int{}, Open: s.Open}
	return s
}

func (r *recorder) finish(took time.Duration) *Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result.Seconds = took.Seconds()
	r.result.Handshake = r.handshakes.Summary()
	r.result.Request = r.requests.Summary()
	return &r.result
}

// errStatus is an answer that is not 200.
type errStatus int

func (e errStatus) Error() string { return fmt.Sprintf("status %d", int(e)) }

// classify names the reason of a loss.
func classify(err error) string {
	var (
		transport *quic.TransportError
		app       *quic.ApplicationError
		reset     *quic.StatelessResetError
		idle      *quic.IdleTimeoutError
		handshake *quic.HandshakeTimeoutError
		version   *quic.VersionNegotiationError
		stream    *quic.StreamError
		status    errStatus
		errno     syscall.Errno
	)
	switch {
	case errors.Is(err, content.ErrCorrupt):
		return "corrupt_body"
	case errors.As(err, &status):
		return "http_status"
	case errors.As(err, &reset):
		return "stateless_reset"
	case errors.As(err, &handshake):
		return "handshake_timeout"
	case errors.As(err, &idle):
		return "idle_timeout"
	case errors.As(err, &version):
		return "version_negotiation"
	case errors.As(err, &transport):
		switch {
		case transport.ErrorCode == quic.ConnectionRefused:
			return "connection_refused"
		case transport.ErrorCode.IsCryptoError():
			return "tls"
		}
		return "transport_error"
	case errors.As(err, &app):
		return "application_close"
	case errors.As(err, &stream):
		return "stream_reset"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, errTimeout):
		return "timeout"
	case errors.Is(err, quic.Err0RTTRejected):
		return "early_data_rejected"
	case errors.As(err, &errno):
		return "socket"
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return "short_body"
	}
	return "other"
}

// rejected says whether the server did not process the request.
func rejected(err error) bool {
	h3, ok := errors.AsType[*http3.Error](err)
	return ok && h3.ErrorCode == http3.ErrCodeRequestRejected
}
