// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/sandbox"
)

// server is one server process.
type server struct {
	*sandbox.Process
	number uint32
	ready  chan struct{} // closed when the server says that it serves
}

// errNotReady says that a server ended or kept silent before it was ready.
var errNotReady = errors.New("not ready")

// startServer starts a server process.
func startServer(st *sandbox.Starter, number uint32, self [2]string, args, environ []string) (*server, error) {
	s := &server{number: number, ready: make(chan struct{})}
	var once sync.Once
	process, err := st.Start(self, append([]string{ServerCommand}, args...), environ, func(line []byte) {
		if _, ok := parseReady(line); ok {
			once.Do(func() { close(s.ready) })
		}
	})
	if err != nil {
		return nil, fmt.Errorf("start server %d: %w", number, err)
	}
	s.Process = process
	return s, nil
}

// waitReady returns once the server serves.
func (s *server) waitReady(ctx context.Context, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case <-s.ready:
		return nil
	case <-s.Ended():
		select {
		case <-s.ready: // before
			return nil
		default:
		}
		return fmt.Errorf("server %d: %w: %s%s", s.number, errNotReady, s.How(), s.Tail.Because())
	case <-ctx.Done():
		return fmt.Errorf("server %d: %w after %v%s", s.number, errNotReady, patience, s.Tail.Because())
	}
}

// terminate asks the server to end.
func (s *server) terminate() { s.Signal(unix.SIGTERM) }
