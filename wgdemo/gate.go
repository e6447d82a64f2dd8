// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/tun"
)

// gate is a TUN device that is read only while the gate is open. It can be written to at
// any time. It is closed at first.
//
// It tells its device nothing of what happens to the interface: the gateway decides when
// the device goes up, and the MTU is what it was at the start of the process.
type gate struct {
	tun.Device
	mtu    int
	events chan tun.Event // stays empty
	quiet  sync.WaitGroup

	mu      sync.Mutex
	changed sync.Cond
	open    bool
	closed  bool
	reading bool
}

func newGate(inner tun.Device) (*gate, error) {
	mtu, err := inner.MTU()
	if err != nil {
		return nil, err
	}
	g := &gate{Device: inner, mtu: mtu, events: make(chan tun.Event)}
	g.changed.L = &g.mu
	g.quiet.Go(func() {
		defer close(g.events)
		for range inner.Events() {
		}
	})
	return g, nil
}

func (g *gate) MTU() (int, error)        { return g.mtu, nil }
func (g *gate) Events() <-chan tun.Event { return g.events }

// Read waits until the gate is open.
func (g *gate) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	for {
		if !g.enter() {
			return 0, os.ErrClosed
		}
		n, err := g.Device.Read(bufs, sizes, offset)
		g.exit()
		if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
			continue // the gate was shut
		}
		return n, err
	}
}

func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for !g.open && !g.closed {
		g.changed.Wait()
	}
	g.reading = !g.closed
	return g.reading
}

func (g *gate) exit() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reading = false
	g.changed.Broadcast()
}

// setOpen opens or shuts the gate. When it returns after shutting nobody reads the device
// any more.
func (g *gate) setOpen(open bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || g.open == open {
		return nil
	}
	var deadline time.Time
	if !open {
		deadline = time.Unix(1, 0)
	}
	if err := g.Device.File().SetReadDeadline(deadline); err != nil {
		return fmt.Errorf("interrupt the reader of the TUN device: %w", err)
	}
	g.open = open
	g.changed.Broadcast()
	for !open && g.reading && !g.closed {
		g.changed.Wait()
	}
	return nil
}

// Close closes the descriptor of the device. The device lives while another process has
// one.
func (g *gate) Close() error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return nil
	}
	g.closed = true
	g.changed.Broadcast()
	g.mu.Unlock()
	err := g.Device.Close()
	g.quiet.Wait()
	return err
}
