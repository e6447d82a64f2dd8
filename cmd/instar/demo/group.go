// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"time"

	"instar/dispatch"
)

// watchGroup records the packets of each generation in every step, as the data
// plane counts them, until ctx ends.
func (r *runner) watchGroup(ctx context.Context) {
	g, err := openGroup(r.root)
	if err != nil {
		r.fail("read the group: %v", err)
		return
	}
	defer func() { _ = g.Close() }()

	seen := map[uint32]uint64{}
	read := func(first bool) {
		at := time.Since(r.zero)
		s, err := g.Snapshot()
		if err != nil {
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.run.Verdicts = s.Verdicts
		for _, info := range s.Generations {
			n := info.Packets - seen[info.Number]
			seen[info.Number] = info.Packets
			if n == 0 || first {
				continue
			}
			// The packets came in the step that has just ended.
			to := r.step(at - step/2)
			if to.Packets == nil {
				to.Packets = map[uint32]uint64{}
			}
			to.Packets[info.Number] += n
		}
	}
	read(true)
	tick := time.NewTicker(step)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			read(false)
		}
	}
}

// openGroup opens the only group of the sandbox.
func openGroup(root string) (*dispatch.Group, error) {
	entries, err := dispatch.List(root)
	if err != nil {
		return nil, err
	}
	if len(entries) != 1 {
		return nil, dispatch.ErrNotExist
	}
	return dispatch.OpenPath(entries[0].Path)
}

// release removes the group after the last server ended. It proves that no
// socket is left: a group that holds one is refused.
func (r *runner) release() {
	if r.method != MethodInstar {
		return
	}
	entries, err := dispatch.List(r.root)
	if err != nil {
		r.fail("list groups: %v", err)
		return
	}
	for _, e := range entries {
		if err := dispatch.Forget(e.Path); err != nil {
			r.fail("forget the group: %v", err)
		}
	}
}
