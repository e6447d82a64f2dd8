// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Lease is the right to do what only one process may do: a periodic job, a
// single writer. At most one process of a server has it.
type Lease struct {
	h      *Handover
	ctx    context.Context
	cancel context.CancelCauseFunc
	once   sync.Once
}

// Lease waits until this process serves and nobody in it has the lease. When a
// successor is about to take over, the lease's context ends, and the commit
// waits until it is released. After a successor failed Lease can be called
// again, and waits until the failed one has released it or is gone. The error is
// ctx's, ErrSuperseded, ErrRolledBack or ErrClosed.
func (h *Handover) Lease(ctx context.Context) (*Lease, error) {
	for {
		h.mu.Lock()
		changed := h.news
		switch {
		case h.phase == phaseClosed:
			h.mu.Unlock()
			return nil, fmt.Errorf("lease: %w", ErrClosed)
		case h.phase == phaseSuperseded:
			h.mu.Unlock()
			return nil, fmt.Errorf("lease: %w", h.cause)
		case h.phase == phaseActive && h.lease == nil && !h.leaseAway:
			l := &Lease{h: h}
			l.ctx, l.cancel = context.WithCancelCause(h.ctx)
			h.lease = l
			h.mu.Unlock()
			return l, nil
		}
		h.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("lease: %w", ctx.Err())
		}
	}
}

// Context ends when the lease has to be released; its cause is ErrSuperseded or
// ErrRolledBack.
func (l *Lease) Context() context.Context { return l.ctx }

// Release gives the lease back. More calls do nothing.
func (l *Lease) Release() {
	l.once.Do(func() {
		l.cancel(context.Canceled)
		l.h.mu.Lock()
		defer l.h.mu.Unlock()
		l.h.lease = nil
		l.h.changed()
	})
}

// returnLease waits until nobody in this process has the lease, or it is closed.
func (h *Handover) returnLease() {
	for {
		h.mu.Lock()
		l, changed := h.lease, h.news
		h.mu.Unlock()
		if l == nil || h.ctx.Err() != nil {
			return
		}
		select {
		case <-changed:
		case <-h.ctx.Done():
		}
	}
}

// awaitReturn lets nobody here have the lease until the successor, which was
// rolled back, closes its end of the connection: then it has released the lease,
// or is gone.
func (h *Handover) awaitReturn(p *peer) {
	h.mu.Lock()
	h.leaseAway = true
	h.mu.Unlock()
	h.wg.Go(func() {
		defer p.close()
		defer p.limit(h.ctx, forever)()
		for {
			f, err := p.receive()
			closeAll(f.fds)
			if err != nil && !errors.Is(err, ErrProtocol) {
				break
			}
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.leaseAway = false
		h.changed()
	})
}

const forever = 100 * 365 * 24 * time.Hour

// awaitLease ends the lease and waits for its release.
func (h *Handover) awaitLease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, h.opt.CommitTimeout)
	defer cancel()
	for {
		h.mu.Lock()
		l, changed := h.lease, h.news
		h.mu.Unlock()
		if l == nil {
			return nil
		}
		l.cancel(ErrSuperseded)
		select {
		case <-changed:
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fmt.Errorf("the lease was not released in %v; release it when its context ends", h.opt.CommitTimeout)
			}
			return ctx.Err()
		}
	}
}
