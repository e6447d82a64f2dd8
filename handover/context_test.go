// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// The wait for a predecessor that does not answer ends with the context, and the
// predecessor learns it.
func TestNewContext(t *testing.T) {
	socket := socketPath(t)
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	options := testOptions(t, socket)
	options.UpgradeTimeout = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	result := make(chan error, 1)
	go func() {
		_, err := NewContext(ctx, options)
		result <- err
	}()
	c, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPeer(c)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	defer p.limit(t.Context(), patience)()
	if _, err := p.want(frameHello); err != nil {
		t.Errorf("want HELLO: %v", err)
	}
	cancel()
	err = receiveError(t, "NewContext", result)
	if !errors.Is(err, context.Canceled) || !strings.HasPrefix(err.Error(), "new handover: take over at "+socket) {
		t.Errorf("NewContext: %v", err)
	}
	if _, err := p.want(frameAccepted); !errors.As(err, new(*RefusedError)) || err.Error() != context.Canceled.Error() {
		t.Errorf("the predecessor heard %v", err)
	}
}

// With a context that is done New does not begin; one that is done later has no
// meaning.
func TestNewContextEdges(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	socket := socketPath(t)
	h, err := NewContext(ctx, testOptions(t, socket))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := h.Ready(t.Context()); err != nil {
		t.Errorf("Ready: %v", err)
	}
	if _, err := NewContext(ctx, testOptions(t, socketPath(t))); !errors.Is(err, context.Canceled) {
		t.Errorf("NewContext: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket: %v", err)
	}
}

// Ready's context ends its wait for a state that does not come.
func TestReadyWhileStateIsDue(t *testing.T) {
	socket := socketPath(t)
	writing := make(chan struct{})
	first := mustStart(t, testOptions(t, socket), nil)
	first.OnHandover(func(ctx context.Context, _ io.Writer) error {
		close(writing)
		<-ctx.Done()
		return ctx.Err()
	})
	h, err := New(testOptions(t, socket))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- h.Ready(ctx) }()
	<-writing
	cancel()
	if err := receiveError(t, "Ready", result); !errors.Is(err, context.Canceled) {
		t.Errorf("Ready: %v", err)
	}
}
