// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"time"

	"instar/internal/content"
)

// Response headers that say who answered.
const (
	HeaderGeneration = "Instar-Generation"
	HeaderPID        = "Instar-Pid"
)

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
	mux.HandleFunc("GET /bytes/{n}", content.Serve)
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

// serveStream answers /stream?seconds=S: a line every 100 ms.
func (s *Server) serveStream(w http.ResponseWriter, r *http.Request) {
	seconds, ok := content.Number(w, "seconds", r.FormValue("seconds"), 10, 1, content.MaxSeconds)
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
	seconds, ok := content.Number(w, "seconds", r.FormValue("seconds"), 2, 0, content.MaxSeconds)
	if !ok {
		return
	}
	select {
	case <-time.After(time.Duration(seconds) * time.Second):
		fmt.Fprintf(w, "answered after %d s by generation %d\n", seconds, s.sockets.generation())
	case <-r.Context().Done():
	}
}
