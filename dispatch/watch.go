// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// pollEvery replaces notifications where inotify(7) is not to be had.
const pollEvery = 20 * time.Millisecond

// watch learns of changes that other processes make. A writer touches the group's
// folder at the end of each change (notify); inotify tells everybody else. It is also
// the guard: a living generation notices within guardEvery that the active one
// died, and repairs the table.
//
// Its goroutine runs from the first subscription until stop.
type watch struct {
	group *Group

	mu      sync.Mutex
	started bool
	stopped bool
	// changed is closed, and replaced, at each change and at each tick.
	changed     chan struct{}
	generations []*Generation

	events *os.File
	done   chan struct{}
}

func newWatch(g *Group) *watch {
	return &watch{group: g, changed: make(chan struct{}), done: make(chan struct{})}
}

// notify tells all processes of the group that the table changed.
func (g *Group) notify() {
	now := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, g.home.path(), now, 0); err != nil {
		// They look by themselves every guardEvery.
		g.log.Debug("touch group's folder", "group", g.key.String(), "err", err)
	}
	g.watch.wake()
}

// next returns a channel that is closed at the next change, or tick.
func (w *watch) next() (<-chan struct{}, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.start(); err != nil {
		return nil, err
	}
	return w.changed, nil
}

// add makes the watch keep a generation's Superseded channel.
func (w *watch) add(n *Generation) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.generations = append(w.generations, n)
	return w.start()
}

func (w *watch) remove(n *Generation) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.generations = slices.DeleteFunc(w.generations, func(m *Generation) bool { return m == n })
}

// start needs mu.
func (w *watch) start() error {
	if w.stopped {
		return ErrClosed
	}
	if w.started {
		return nil
	}
	every := guardEvery
	events, err := inotify(w.group.home.path())
	if err != nil {
		w.group.log.Warn("no notifications of changes, polling instead", "group", w.group.key.String(), "err", err)
		every = pollEvery
		// A pipe that nobody writes to gives the same loop its ticks.
		var silent *os.File
		if events, silent, err = os.Pipe(); err != nil {
			return fmt.Errorf("watch folder: %w", err)
		}
		go func() {
			<-w.done
			_ = silent.Close()
		}()
	}
	w.started = true
	w.events = events
	go w.run(every)
	return nil
}

func (w *watch) stop() {
	w.mu.Lock()
	w.stopped = true
	started := w.started
	w.mu.Unlock()
	if !started {
		return
	}
	// Closing is what ends the goroutine's read.
	_ = w.events.Close()
	<-w.done
	// Those who wait learn that there is nothing to wait for.
	w.wake()
}

func (w *watch) run(every time.Duration) {
	defer close(w.done)
	buffer := make([]byte, 4096)
	for {
		if w.events.SetReadDeadline(time.Now().Add(every)) != nil {
			return
		}
		_, err := w.events.Read(buffer)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			w.guard()
		case err != nil:
			return
		}
		w.wake()
	}
}

// wake looks at the table and passes on what changed.
func (w *watch) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.generations {
		n.observe()
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

// guard repairs the table when the active generation is dead and this process has
// a living one.
func (w *watch) guard() {
	w.mu.Lock()
	joined := len(w.generations) > 0
	w.mu.Unlock()
	if !joined || !w.group.activeDied() {
		return
	}
	if err := w.group.Repair(); err != nil && !errors.Is(err, ErrClosed) {
		w.group.log.Error("repair group", "group", w.group.key.String(), "err", err)
	}
}

// inotify opens a file that becomes readable when the folder is touched.
func inotify(dir string) (*os.File, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_ATTRIB); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("inotify_add_watch", err)
	}
	return os.NewFile(uintptr(fd), "inotify:"+dir), nil
}
