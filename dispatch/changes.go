// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync/atomic"
	"time"

	"instar/bpf"
)

// ChangeKind is what happened to a generation.
type ChangeKind string

const (
	// ChangeJoined means that its sockets are registered.
	ChangeJoined ChangeKind = "joined"
	// ChangeActivated means that new flows go to it, for the first time or again.
	ChangeActivated ChangeKind = "activated"
	// ChangeSuperseded means that another generation took its place: it drains.
	ChangeSuperseded ChangeKind = "superseded"
	// ChangeDied means that none of its sockets is left, and it did not leave.
	ChangeDied ChangeKind = "died"
	// ChangeLeft means that it took its sockets out of the group, or that somebody did
	// (Group.Evict). Its process lives.
	ChangeLeft ChangeKind = "left"
	// ChangeGone means that it has left or died: its process was gone, or is in another PID
	// namespace, when somebody looked.
	ChangeGone ChangeKind = "gone"
)

// rank orders what happened at the same time: a flip is told before what it ends.
var rank = map[ChangeKind]int{ChangeJoined: 1, ChangeActivated: 2, ChangeSuperseded: 3, ChangeDied: 4, ChangeLeft: 4, ChangeGone: 4}

// Change is what changed in a group.
type Change struct {
	// Time is when it happened. A generation that died, left or is gone did so before,
	// by a quarter of a second at most where notifications work.
	Time time.Time  `json:"time"`
	Kind ChangeKind `json:"change"`
	// Generation, PID, Command and Build are as in GenerationInfo.
	Generation uint32 `json:"generation"`
	PID        int    `json:"pid"`
	Command    string `json:"command,omitempty"`
	Build      string `json:"build,omitempty"`
}

// Changes calls f with each change of the group from now on, in the order of their times,
// until ctx ends, which is no error. Of changes that follow each other too fast to be seen one
// by one the last of each kind is told: a generation that joined and was gone again before
// anybody looked is not. ready, unless it is nil, is called once, when nothing that comes
// after it is missed.
//
// Changes are learned by inotify(7); a death by looking four times a second.
//
// Errors: what f returns, ErrClosed when the Group is closed, and ErrNotExist when the
// group is forgotten.
func (g *Group) Changes(ctx context.Context, ready func(), f func(Change) error) error {
	before, err := g.seen()
	for first := true; ; first = false {
		// The channel comes before the look, so that no change falls in between.
		var changed <-chan struct{}
		if err == nil {
			changed, err = g.watch.next()
		}
		var after map[uint32]seen
		if err == nil {
			after, err = g.seen()
		}
		if err != nil {
			return fmt.Errorf("watch %s: %w", g.key, err)
		}
		for _, e := range changesOf(before, after, lives) {
			if err := f(e); err != nil {
				return err
			}
		}
		before = after
		if first && ready != nil {
			ready()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
		if at, ok := g.home.(*folder); ok {
			if replaced, err := at.replaced(); replaced || errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("watch %s: the group is forgotten: %w", g.key, ErrNotExist)
			}
		}
	}
}

// seen is a generation of the order.
type seen struct {
	info bpf.Info
	// command is the name of its process, empty when that is not to be seen.
	command string
	dead    bool
}

// seen looks at the table without the lock, as Snapshot does.
func (g *Group) seen() (map[uint32]seen, error) {
	release, err := g.use()
	if err != nil {
		return nil, err
	}
	defer release()
	t := &g.table
	var found map[uint32]seen
	for range 100 {
		before := atomic.LoadUint64(&t.Changes)
		word := t.active()
		slots, _ := t.orderOf(word)
		found = make(map[uint32]seen, len(slots))
		for _, slot := range slots {
			s := seen{info: t.Info[slot], dead: !g.alive(slot)}
			if s.info.PidNamespace == pidNamespace() {
				s.command = command(int(s.info.Pid), s.info.PidStart)
			}
			found[t.Slots[slot].Number] = s
		}
		if atomic.LoadUint64(&t.Changes) == before && t.active() == word {
			break
		}
	}
	return found, nil
}

// changesOf compares two looks, the later one of which was taken just now.
func changesOf(before, after map[uint32]seen, lives func(*bpf.Info) bool) []Change {
	// Both clocks are read once, so that events of one moment have one time.
	at, wallAt := now(), time.Now()
	var list []Change
	add := func(kind ChangeKind, number uint32, s seen, when uint64) {
		list = append(list, Change{Time: wallAt.Add(time.Duration(int64(when) - int64(at))), Kind: kind, Generation: number,
			PID: int(s.info.Pid), Command: s.command, Build: text(s.info.Build[:])})
	}
	for number, is := range after {
		was, known := before[number]
		if !known {
			add(ChangeJoined, number, is, is.info.Joined)
		}
		if t := is.info.Activated; t != 0 && t != was.info.Activated {
			add(ChangeActivated, number, is, t)
		}
		if t := is.info.Superseded; t != 0 && t != was.info.Superseded {
			add(ChangeSuperseded, number, is, t)
		}
		if is.dead && !was.dead {
			is.command = cmp.Or(is.command, was.command)
			add(ChangeDied, number, is, at)
		}
	}
	for number, was := range before {
		if _, still := after[number]; still || was.dead {
			continue // ChangeDied was told
		}
		kind := ChangeGone
		if lives(&was.info) {
			kind = ChangeLeft
		}
		add(kind, number, was, at)
	}
	slices.SortFunc(list, func(a, b Change) int {
		return cmp.Or(a.Time.Compare(b.Time), cmp.Compare(rank[a.Kind], rank[b.Kind]), cmp.Compare(a.Generation, b.Generation))
	})
	return list
}
