// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestControlServer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control")
	now := Status{Peer: Peer{Name: "x", Generation: 1, PID: 11}, Phase: "active", Handed: []string{"web"}}
	var fails error
	var mu sync.Mutex
	c := &ControlServer{
		Status: func() Status {
			mu.Lock()
			defer mu.Unlock()
			return now
		},
		Upgrade: func(context.Context) error {
			mu.Lock()
			defer mu.Unlock()
			if fails == nil {
				now.Generation++
			}
			return fails
		},
	}
	if err := c.Listen(path); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	other := &ControlServer{Status: c.Status, Upgrade: c.Upgrade}
	if err := other.Listen(path); err == nil {
		t.Error("a second one listens at the same path")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { c.Serve(ctx) })

	if got, err := RequestStatus(t.Context(), path); err != nil || got.PID != 11 || got.Phase != "active" || len(got.Handed) != 1 {
		t.Errorf("status: %+v, %v", got, err)
	}
	got, err := RequestUpgrade(t.Context(), path)
	if err != nil || got.Generation != 1 || got.Phase != "draining" || got.Successor == nil || got.Successor.Generation != 2 {
		t.Errorf("upgrade: %+v, %v", got, err)
	}
	set := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		fails = err
	}
	set(ErrUpgrading)
	if got, err = RequestUpgrade(t.Context(), path); !errors.Is(err, ErrUpgrading) || got.Generation != 2 || got.Successor != nil {
		t.Errorf("refused upgrade: %+v, %v", got, err)
	}
	set(errors.New("the successor ended"))
	var refused *RefusedError
	if _, err = RequestUpgrade(t.Context(), path); !errors.As(err, &refused) || refused.Code != "failed" || refused.Reason != "the successor ended" {
		t.Errorf("failed upgrade: %v", err)
	}
	// A process that wants to take over learns that it cannot.
	if h, err := New(Options{Socket: path}); err == nil {
		t.Error("somebody takes over", h.Close())
	} else if !errors.Is(err, ErrProtocol) {
		t.Error(err)
	}

	cancel()
	wg.Wait()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the path is left: %v", err)
	}
	if _, err := RequestStatus(t.Context(), path); !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
}
