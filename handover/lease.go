// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
// again. The error is ctx's, ErrSuperseded or ErrClosed.
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
		case h.phase == phaseActive && h.lease == nil:
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

// Context ends when the lease has to be released; its cause is ErrSuperseded.
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
