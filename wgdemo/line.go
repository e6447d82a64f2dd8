// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// line is one end of a socket pair between a process and its successor. From the commit on
// the predecessor tells which peers came to it after it had written its state, and the
// successor answers when it has all of them.
type line struct {
	conn net.Conn

	mu     sync.Mutex // of the writer, and what follows
	number int        // of the last word that was told
	have   int        // the highest number that was answered; -1 before
	change chan struct{}
}

// word is what is said on a line, as JSON, one a packet: a successor that dies while it
// reads leaves no half of one to the next.
type word struct {
	// Number counts the words of a predecessor. The state has the number of the last one
	// before it.
	Number int `json:"number,omitempty"`
	state
	// Moved is, of a successor, the number up to which it has all peers.
	Moved *int `json:"moved,omitempty"`
}

// newLine returns the end of a predecessor, and the one that is handed over.
func newLine() (near *line, far *net.UnixConn, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range pair {
		f := os.NewFile(uintptr(fd), "line")
		c, failed := net.FileConn(f)
		if err = errors.Join(err, failed, f.Close()); failed == nil {
			conns[i] = c.(*net.UnixConn)
		}
	}
	if err != nil {
		for _, c := range conns {
			if c != nil {
				err = errors.Join(err, c.Close())
			}
		}
		return nil, nil, fmt.Errorf("make line to successor: %w", err)
	}
	return &line{conn: conns[0], have: -1, change: make(chan struct{})}, conns[1], nil
}

// patience is how long the other end may be busy. What it does not hear costs a peer some
// seconds, until it comes by itself.
const patience = time.Second

func (l *line) send(w word) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sendLocked(w)
}

func (l *line) sendLocked(w word) {
	b, err := json.Marshal(w)
	if err == nil && l.conn.SetWriteDeadline(time.Now().Add(patience)) == nil {
		_, _ = l.conn.Write(b) // one that is gone need not know
	}
}

// maxPeers is how many peers fit into a word.
const maxPeers = 100

// tell tells a successor.
func (l *line) tell(peers []peerStatus) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for part := range slices.Chunk(peers, maxPeers) {
		l.number++
		l.sendLocked(word{Number: l.number, state: stateOf(part)})
	}
}

// last is the number of the last word.
func (l *line) last() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.number
}

// answered takes a successor's answer.
func (l *line) answered(number *int) {
	if number == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.have = max(l.have, *number)
	close(l.change)
	l.change = make(chan struct{})
}

// forget makes answers of a successor that failed count no more.
func (l *line) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.number++
	l.have = -1
}

// moved returns a channel that is closed when the successor has all that it was told of, if
// that is before ctx is done.
func (l *line) moved(ctx context.Context) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		for {
			l.mu.Lock()
			all, change := l.have >= l.number, l.change
			l.mu.Unlock()
			if all {
				close(done)
				return
			}
			select {
			case <-change:
			case <-ctx.Done():
				return
			}
		}
	}()
	return done
}

// receive calls each with every word until the line is closed.
func (l *line) receive(log *slog.Logger, each func(word)) {
	b := make([]byte, 64<<10)
	for {
		n, err := l.conn.Read(b)
		if err != nil || n == 0 {
			return // closed here or there
		}
		var w word
		if err := json.Unmarshal(b[:n], &w); err != nil {
			log.Warn("not understood what another generation says", "error", err)
			continue
		}
		each(w)
	}
}
