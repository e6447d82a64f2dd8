// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"
)

// Response headers that say who answered.
const (
	HeaderGeneration = "Instar-Generation"
	HeaderPID        = "Instar-Pid"
)

// maxSeconds is the longest stream or slow response.
const maxSeconds = 600

//go:embed page.html
var page []byte

// Status is what /status answers.
type Status struct {
	Generation uint32 `json:"generation"`
	// State is the generation's: "staged", "active", "draining" or "gone".
	State string `json:"state"`
	PID   int    `json:"pid"`
	Build string `json:"build"`
	Mode  Mode   `json:"mode"`
	// Uptime is how long the process has been serving, in seconds.
	Uptime float64 `json:"uptime"`
	// Connections counts the QUIC connections that are open, handshakes included.
	Connections int `json:"connections"`
	// Requests counts the requests that were received.
	Requests int64 `json:"requests"`
	// Remote is the client's address as the server sees it at this moment.
	Remote string `json:"remote,omitempty"`
}

// Status describes the server as it is now.
func (s *Server) Status() Status {
	return Status{
		Generation:  s.sockets.generation(),
		State:       s.sockets.state(),
		PID:         os.Getpid(),
		Build:       s.cfg.Build,
		Mode:        s.cfg.Mode,
		Uptime:      time.Since(s.started).Seconds(),
		Connections: s.conns.live(),
		Requests:    s.requests.Load(),
	}
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write(page) // who is not there needs no page
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) {
		status := s.Status()
		status.Remote = r.RemoteAddr
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(status)
	})
	mux.HandleFunc("GET /bytes/{n}", serveBytes)
	mux.HandleFunc("GET /stream", s.serveStream)
	mux.HandleFunc("GET /slow", s.serveSlow)

	generation := strconv.FormatUint(uint64(s.sockets.generation()), 10)
	pid := strconv.Itoa(os.Getpid())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		if c := connOf(r.Context()); c != nil {
			defer s.conns.request(c)()
		}
		w.Header().Set(HeaderGeneration, generation)
		w.Header().Set(HeaderPID, pid)
		w.Header().Set("Cache-Control", "no-store")
		mux.ServeHTTP(w, r)
	})
}

// number reads an integer query or path value from low to high.
func number(w http.ResponseWriter, name, text string, fallback, low, high uint64) (uint64, bool) {
	if text == "" {
		return fallback, true
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n < low || n > high {
		http.Error(w, fmt.Sprintf("%s must be a number from %d to %d", name, low, high), http.StatusBadRequest)
		return 0, false
	}
	return n, true
}

// serveBytes answers /bytes/N?seed=SEED&ms=MS: N bytes that follow from the
// seed, written in pieces over MS milliseconds.
func serveBytes(w http.ResponseWriter, r *http.Request) {
	n, ok := number(w, "the number of bytes", r.PathValue("n"), 0, 0, maxContent)
	if !ok {
		return
	}
	seed, ok := number(w, "seed", r.FormValue("seed"), 0, 0, 1<<64-1)
	if !ok {
		return
	}
	ms, ok := number(w, "ms", r.FormValue("ms"), 0, 0, maxSeconds*1000)
	if !ok {
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatUint(n, 10))
	content := NewContent(seed, int64(n))
	buf := bufferPool.Get().(*buffers)
	defer bufferPool.Put(buf)
	if ms == 0 {
		_, _ = io.CopyBuffer(struct{ io.Writer }{w}, content, buf.want)
		return
	}
	const piece = 20 * time.Millisecond
	pieces := max(1, int64(time.Duration(ms)*time.Millisecond/piece))
	tick := time.NewTicker(piece)
	defer tick.Stop()
	for range pieces {
		if _, err := io.CopyBuffer(struct{ io.Writer }{w}, io.LimitReader(content, (int64(n)+pieces-1)/pieces), buf.want); err != nil {
			return
		}
		w.(http.Flusher).Flush()
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}

// serveStream answers /stream?seconds=S: a line every 100 ms.
func (s *Server) serveStream(w http.ResponseWriter, r *http.Request) {
	seconds, ok := number(w, "seconds", r.FormValue("seconds"), 10, 1, maxSeconds)
	if !ok {
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for line := uint64(1); line <= seconds*10; line++ {
		if _, err := fmt.Fprintf(w, "%d generation=%d pid=%d\n", line, s.sockets.generation(), os.Getpid()); err != nil {
			return
		}
		w.(http.Flusher).Flush()
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
	fmt.Fprintln(w, "end")
}

// serveSlow answers /slow?seconds=S: one line after S seconds.
func (s *Server) serveSlow(w http.ResponseWriter, r *http.Request) {
	seconds, ok := number(w, "seconds", r.FormValue("seconds"), 2, 0, maxSeconds)
	if !ok {
		return
	}
	select {
	case <-time.After(time.Duration(seconds) * time.Second):
		fmt.Fprintf(w, "answered after %d s by generation %d\n", seconds, s.sockets.generation())
	case <-r.Context().Done():
	}
}
