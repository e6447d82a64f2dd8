// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"instar/bpf"
	"instar/dispatch/connid"
)

// OwnIndex makes WireGuard messages to an index come to a worker of this generation, for
// Options.FlowTimeout: 300 s by default, which is longer than a session lives with its
// handshake (RejectAfterTime 180 s and RekeyAttemptTime 90 s, section 6.1 of the WireGuard
// paper). Call it before the message leaves that announces the index: an initiation or a
// response, which have it in octets 4 to 7, little endian.
//
// Errors: ErrConflict when another living generation has the index; do not send the message
// then, the peer tries again and a new index is made up. ErrState when the group has another
// steering, ErrOptions when there is no such worker.
func (n *Generation) OwnIndex(worker int, index uint32) error {
	err := n.withIndices(func() error {
		if worker < 0 || worker >= len(n.sockets) {
			return fmt.Errorf("%w: worker %d; there are 0 to %d", ErrOptions, worker, len(n.sockets)-1)
		}
		return n.ownIndex(worker, index)
	})
	if err != nil {
		return fmt.Errorf("own index %#x in generation %d of %s: %w", index, n.number, n.group.key, err)
	}
	return nil
}

func (n *Generation) ownIndex(worker int, index uint32) error {
	flows := n.group.pins.flows
	mine := bpf.Tracked{Owner: uint64(n.Handle(worker))<<32 | uint64(n.number), Seen: now()}
	// Once more when what was in the way has gone meanwhile.
	for range 3 {
		err := flows.Update(index, &mine, ebpf.UpdateNoExist)
		if !errors.Is(err, ebpf.ErrKeyExist) {
			return err
		}
		var theirs bpf.Tracked
		err = flows.Lookup(index, &theirs)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if number := uint32(theirs.Owner); number != n.number && n.group.indexLives(theirs) {
			return fmt.Errorf("%w: generation %d has it", ErrConflict, number)
		}
		// Nobody else takes an entry that has ended for living, so two of us could be here
		// only with the same index, made up at the same moment.
		return flows.Update(index, &mine, ebpf.UpdateExist)
	}
	return fmt.Errorf("%w: it comes and goes", ErrConflict)
}

// indexLives reports whether an entry is that of a generation that holds sockets.
func (g *Group) indexLives(t bpf.Tracked) bool {
	slot := connid.Handle(t.Owner >> 32).Slot()
	found, ok := g.table.find(uint32(t.Owner))
	return ok && found == slot && g.alive(slot) && int64(now()-t.Seen) <= int64(g.flowTimeout())
}

// ReleaseIndex ends OwnIndex: messages to the index go to the active generation. An index
// of another generation stays. Errors are those of OwnIndex.
func (n *Generation) ReleaseIndex(index uint32) error {
	err := n.withIndices(func() error {
		var t bpf.Tracked
		err := n.group.pins.flows.Lookup(index, &t)
		if err == nil && uint32(t.Owner) == n.number {
			err = n.group.pins.flows.Delete(index)
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("release index %#x from generation %d of %s: %w", index, n.number, n.group.key, err)
	}
	return nil
}

func (n *Generation) withIndices(f func() error) error {
	if s := Steering(n.group.table.Steering); s != SteeringWireGuard {
		return fmt.Errorf("%w: the group's steering is %s, which knows no index", ErrState, s)
	}
	return n.group.withPins(f)
}
