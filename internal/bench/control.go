// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/dispatch"
)

// Operation is how long a call of the control plane takes.
type Operation struct {
	Name string `json:"name"`
	Durations
}

// flipName is the name of the row.
const flipName = "flip (Activate)"

func joinName(workers int) string { return fmt.Sprintf("join, sockets: %d", workers) }

// stores is how many stores are timed together: one is faster than the clock.
const stores = 1000

// operations times the calls of package dispatch: flips flips, and everything else
// as often as repeats says.
func operations(ctx context.Context, root string, flips, repeats int) ([]Operation, error) {
	var list []Operation
	measure := func(f func() ([]Operation, error)) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		o, err := f()
		list = append(list, o...)
		return err
	}
	for _, f := range []func() ([]Operation, error){
		func() ([]Operation, error) { return timeOpen(root, repeats) },
		func() ([]Operation, error) { return timeJoin(root, 1, repeats) },
		func() ([]Operation, error) { return timeJoin(root, 64, repeats) },
		func() ([]Operation, error) { return timeJoin(root, 256, repeats) },
		func() ([]Operation, error) { return timeFlips(root, flips) },
	} {
		if err := measure(f); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// timeOpen times the creation of a group, the verifier's work included, and the
// opening of one that exists.
func timeOpen(root string, repeats int) ([]Operation, error) {
	options := dispatch.Options{Network: "udp4", Address: "127.0.0.1:4021", Root: root}
	var creations, openings []time.Duration
	for range repeats {
		start := time.Now()
		g, err := dispatch.Open(options)
		creations = append(creations, time.Since(start))
		if err != nil {
			return nil, err
		}
		start = time.Now()
		again, err := dispatch.Open(options)
		openings = append(openings, time.Since(start))
		if err != nil {
			return nil, errors.Join(err, g.Close())
		}
		if err := errors.Join(again.Close(), g.Close(), dispatch.Forget(g.Path())); err != nil {
			return nil, err
		}
	}
	return []Operation{
		{"create a group (quic)", durations(creations)},
		{"open an existing group", durations(openings)},
	}, nil
}

// timeJoin times the joining of a generation while another one of the same size is
// active.
func timeJoin(root string, workers, repeats int) (list []Operation, err error) {
	g, err := dispatch.Open(dispatch.Options{
		Network: "udp4", Address: fmt.Sprintf("127.0.0.1:%d", 4100+workers), Root: root,
		Steering: dispatch.SteeringStateless, Workers: dispatch.LimitWorkers,
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	active, err := g.Join(workers)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, active.Close()) }()
	if err := active.Activate(); err != nil {
		return nil, err
	}
	var joins []time.Duration
	for range repeats {
		start := time.Now()
		n, err := g.Join(workers)
		joins = append(joins, time.Since(start))
		if err != nil {
			return nil, err
		}
		if err := n.Close(); err != nil {
			return nil, err
		}
	}
	return []Operation{{joinName(workers), durations(joins)}}, nil
}

// timeFlips times Activate between two generations in turns, and the store in it that
// makes the change.
func timeFlips(root string, flips int) (list []Operation, err error) {
	g, err := dispatch.Open(dispatch.Options{
		Network: "udp4", Address: "127.0.0.1:4022", Root: root, Steering: dispatch.SteeringStateless,
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	var generations [2]*dispatch.Generation
	for i := range generations {
		n, err := g.Join(workers)
		if err != nil {
			return nil, err
		}
		defer func() { _ = n.Close() }()
		generations[i] = n
	}
	var took []time.Duration
	for i := range flips {
		n := generations[i%2]
		start := time.Now()
		err := n.Activate()
		took = append(took, time.Since(start))
		if err != nil {
			return nil, err
		}
	}
	store, err := timeStores(g, flips)
	if err != nil {
		return nil, err
	}
	return []Operation{
		{flipName, durations(took)},
		{"of a flip, the store", durations(store)},
	}, errors.Join(generations[0].Close(), generations[1].Close())
}

// timeStores times the store of a flip alone, by storing the word that is there
// already. Each value is the average of a thousand.
func timeStores(g *dispatch.Group, count int) (took []time.Duration, err error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(g.Path(), "control"), nil)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	memory, err := unix.Mmap(m.FD(), 0, int(unsafe.Sizeof(bpf.Control{})), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map control map into memory: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Munmap(memory)) }()
	active := &(*bpf.Control)(unsafe.Pointer(&memory[0])).Active
	word := atomic.LoadUint64(active)
	for range count {
		start := time.Now()
		for range stores {
			atomic.StoreUint64(active, word)
		}
		took = append(took, time.Since(start)/stores)
	}
	return took, nil
}
