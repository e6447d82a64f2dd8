// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"

	"instar/internal/bpffs"
)

// List finds the groups below a root, in all network namespaces. A group that cannot be
// read is listed with its error. An empty root, or none yet on a bpffs, is an empty list;
// without a bpffs it is ErrNoBPFFS.
func List(root string) ([]Entry, error) {
	if root == "" {
		root = DefaultRoot
	}
	here, err := namespaceName()
	if err != nil {
		return nil, err
	}
	if err := checkRoot(root); errors.Is(err, ErrNoBPFFS) {
		return nil, fmt.Errorf("list groups: %w", err)
	}
	namespaces, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("list groups: %w: folder %s belongs to uid %s", ErrPermission, root, ownerOf(root))
	}
	if err != nil {
		return nil, fmt.Errorf("list groups: %w", err)
	}
	type place struct{ path, namespace string }
	var places []place
	for _, ns := range namespaces {
		// A root that is a bpffs itself also has the kernel's own files.
		if !ns.IsDir() {
			continue
		}
		groups, err := os.ReadDir(filepath.Join(root, ns.Name()))
		if err != nil {
			return nil, fmt.Errorf("list groups: %w", err)
		}
		for _, e := range groups {
			if !isGroup(e.Name()) || !e.IsDir() {
				continue
			}
			places = append(places, place{filepath.Join(root, ns.Name(), e.Name()), ns.Name()})
		}
	}
	if len(places) == 0 {
		return nil, nil
	}
	// A group takes a dozen system calls; there may be thousands.
	list := make([]Entry, len(places))
	var next atomic.Int64
	var readers sync.WaitGroup
	for range min(len(places), runtime.GOMAXPROCS(0)) {
		readers.Go(func() {
			for i := next.Add(1) - 1; int(i) < len(places); i = next.Add(1) - 1 {
				list[i] = entry(places[i].path, places[i].namespace, here)
			}
		})
	}
	readers.Wait()
	return list, nil
}

func entry(path, namespace, here string) Entry {
	e := Entry{Path: path, Netns: namespace, Here: namespace == here, Name: filepath.Base(path)}
	if name, err := bpffs.Unescape(e.Name); err == nil {
		e.Name = name
	}
	g, err := OpenPath(path)
	if err != nil {
		e.Err = err
		return e
	}
	s, err := g.Snapshot()
	if err = errors.Join(err, g.Close()); err != nil {
		e.Err = err
		return e
	}
	e.Snapshot = &s
	return e
}

// Forget removes the pins of a group that no live socket uses, and with them its
// secrets: clients of a killed server then get no stateless reset any more. It refuses a
// group whose sockets live (ErrState), and works on one whose pins are damaged or
// of an unknown layout.
func Forget(path string) error {
	path = filepath.Clean(path)
	if err := forget(path); err != nil {
		return fmt.Errorf("forget %s: %w", path, err)
	}
	return nil
}

func forget(path string) error {
	on, err := bpffs.IsBPFFS(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("group %w", ErrNotExist)
	}
	if err != nil {
		return err
	}
	if name := filepath.Base(path); !on || !isGroup(name) {
		return fmt.Errorf("%w: it is no folder of a group", ErrOptions)
	}
	// The folder above is locked too, so that nobody creates a group meanwhile.
	above, err := lock(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { _ = above.Unlock() }()
	l, err := lock(path)
	if err != nil {
		return err
	}
	defer func() { _ = l.Unlock() }()
	live, err := liveSockets(path)
	if err != nil {
		return err
	}
	if live > 0 {
		return fmt.Errorf("%w: %d sockets of the group live; stop their servers first (instar show lists them)", ErrState, live)
	}
	// One step makes the group forgotten; the next build removes what a crash leaves.
	dir := filepath.Dir(path)
	if err := removeAside(dir); err != nil {
		return err
	}
	aside := asideName(dir)
	if err := bpffs.RenameNoReplace(path, aside); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%w for uid %d: folder %s belongs to uid %s", ErrPermission, os.Geteuid(), dir, ownerOf(dir))
		}
		return err
	}
	step("forget")
	return removePins(aside)
}
