// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"context"
	"errors"
	"fmt"
	"net"

	"instar/handover"
)

// takeover gets the listener from the predecessor, by package handover.
type takeover struct{ h *handover.Handover }

func newTakeover(ctx context.Context, cfg ServerConfig) (*takeover, error) {
	h, err := handover.NewContext(ctx, handover.Options{
		Name:      "tcpdemo",
		Socket:    cfg.Socket,
		Probation: cfg.Probation,
		Logger:    cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	return &takeover{h}, nil
}

func (t *takeover) listen(_ context.Context, addr string) (net.Listener, error) {
	return t.h.Listen("http", "tcp", addr)
}

func (t *takeover) ready(ctx context.Context) error { return t.h.Ready(ctx) }
func (t *takeover) generation() int                 { return t.h.Generation() }
func (t *takeover) superseded() <-chan struct{}     { return t.h.Superseded() }

func (t *takeover) err() error {
	if err := t.h.Err(); err != nil && !errors.Is(err, handover.ErrSuperseded) {
		return fmt.Errorf("leave: %w", err)
	}
	return nil
}

func (t *takeover) close() error { return t.h.Close() }
