// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"testing"
	"time"
)

// fake is a connection that is closed when the test says so.
type fake struct{ multi bool }

func (*fake) leave(*entry)                     {}
func (*fake) cut(*entry, error, time.Duration) {}
func (f *fake) multiplexed() bool              { return f.multi }

// model is a drain whose time the test makes.
type model struct {
	*Drainer
	p       pace
	entries []*entry
}

// newModel makes n entries, entry i idle for longer than entry i+1.
func newModel(o Options, n int) *model {
	m := &model{Drainer: New(o)}
	m.p = pace{budget: budget{rate: m.options.CloseRate}, idle: spread{rate: m.options.CloseRate}}
	began := time.Now()
	for i := range n {
		e := newEntry(m.Drainer, "fake", nil, &fake{})
		e.fresh = false
		e.idleSince = began.Add(-time.Hour + time.Duration(i)*time.Second)
		m.entries = append(m.entries, e)
		m.add(e)
	}
	m.began, m.deadline = began, began.Add(m.options.Deadline)
	m.seen = n
	return m
}

// at takes the turns from one time of the drain to another, and returns how
// many are leaving then, and the most that were closed in a turn.
func (m *model) at(from, to time.Duration) (idle, cut, most int) {
	before := m.count(leavingIdle) + m.count(leavingCut)
	for t := from; t < to; t += tick {
		m.turn(&m.p, m.began.Add(t))
		now := m.count(leavingIdle) + m.count(leavingCut)
		most = max(most, now-before)
		before = now
	}
	return m.count(leavingIdle), m.count(leavingCut), most
}

func (m *model) count(l leaving) int {
	n := 0
	for _, e := range m.entries {
		if e.leaving == l {
			n++
		}
	}
	return n
}

// Idle connections are closed in the second half, evenly, in the order of their
// idleness.
func TestSpread(t *testing.T) {
	const n = 1000
	m := newModel(Options{}, n) // 30 s
	if idle, _, _ := m.at(0, 15*time.Second); idle > 0 {
		t.Errorf("%d closed in the first half", idle)
	}
	half := 15 * time.Second
	// A tenth of the second half is left over: 13.5 s for 1,000, 74 in a second.
	for s := 1; s <= 13; s++ {
		idle, cut, most := m.at(half, half+time.Second)
		half += time.Second
		if want := s * 1000 * 10 / 135; idle < want-3 || idle > want+3 || cut > 0 || most > 2 {
			t.Errorf("%d idle and %d cut after %d s, want %d; %d at once", idle, cut, s, want, most)
		}
		for i, e := range m.entries {
			if (e.leaving == leavingIdle) != (i < idle) {
				t.Fatalf("after %d s entry %d is out of order", s, i)
			}
		}
	}
	if idle, cut, _ := m.at(half, 30*time.Second); idle != n || cut > 0 {
		t.Errorf("%d idle and %d cut at the deadline", idle, cut)
	}
}

// The rate is never exceeded, and what it leaves over is closed after the
// deadline: idle ones as such, busy ones cut.
func TestRateIsTheLimit(t *testing.T) {
	const n, busy = 1000, 100
	m := newModel(Options{Deadline: 2 * time.Second, CloseRate: 200}, n)
	for _, e := range m.entries[:busy] {
		e.busy = true
	}
	// A second with 200 in it.
	idle, cut, most := m.at(0, 2*time.Second)
	if idle < 195 || idle > 200 || cut > 0 || most > 5 {
		t.Errorf("%d idle, %d cut at the deadline; %d at once", idle, cut, most)
	}
	idle, cut, most = m.at(2*time.Second, 4*time.Second)
	if sum := idle + cut; sum < 590 || sum > 601 || most > 5 {
		t.Errorf("%d idle, %d cut 2 s after the deadline; %d at once", idle, cut, most)
	}
	idle, cut, _ = m.at(4*time.Second, 7*time.Second)
	if idle != n-busy || cut != busy {
		t.Errorf("%d idle, %d cut in the end, want %d and %d", idle, cut, n-busy, busy)
	}
}

// A drain that stalls makes up for nothing with a burst.
func TestNoBurst(t *testing.T) {
	m := newModel(Options{Deadline: time.Second, CloseRate: 100}, 1000)
	m.turn(&m.p, m.began)
	m.turn(&m.p, m.began.Add(time.Second))
	before := m.count(leavingIdle)
	if before > 102 {
		t.Errorf("%d at once after a second", before)
	}
	m.turn(&m.p, m.began.Add(time.Second+tick))
	if got := m.count(leavingIdle) - before; got > 3 {
		t.Errorf("%d at once", got)
	}
}

// One that has its own deadline goes by it.
func TestOwnDeadline(t *testing.T) {
	m := newModel(Options{Deadline: 10 * time.Second}, 2)
	m.entries[0].limit = 2 * time.Second
	m.entries[0].busy = true
	m.entries[1].limit = 2 * time.Second
	if idle, cut, _ := m.at(0, time.Second); idle+cut > 0 {
		t.Errorf("%d idle, %d cut in its first half", idle, cut)
	}
	if idle, cut, _ := m.at(time.Second, 2*time.Second); idle != 1 || cut > 0 {
		t.Errorf("%d idle, %d cut at its deadline", idle, cut)
	}
	if idle, cut, _ := m.at(2*time.Second, 3*time.Second); idle != 1 || cut != 1 {
		t.Errorf("%d idle, %d cut after its deadline", idle, cut)
	}
}

// One that has just got its response is not closed: it is about to send the
// next request.
func TestNotYetIdle(t *testing.T) {
	m := newModel(Options{Deadline: 20 * time.Second}, 2)
	m.entries[1].idleSince = m.began.Add(15 * time.Second)
	m.p.idle.credit, m.p.budget.credit = 10, 10 // everybody's turn
	m.turn(&m.p, m.began.Add(15*time.Second+heed/2))
	if m.entries[0].leaving != leavingIdle || m.entries[1].leaving != staying {
		t.Errorf("%v, %v", m.entries[0].leaving, m.entries[1].leaving)
	}
	m.p.idle.credit, m.p.budget.credit = 10, 10
	m.turn(&m.p, m.began.Add(15*time.Second+heed))
	if m.entries[1].leaving != leavingIdle {
		t.Errorf("%v", m.entries[1].leaving)
	}
}

// One that has never sent a request is given a second, however short the
// deadline.
func TestFreshIsNotIdle(t *testing.T) {
	m := newModel(Options{Deadline: 100 * time.Millisecond}, 1)
	e := m.entries[0]
	e.fresh, e.idleSince = true, m.began
	if _, idle := e.idleFor(m.began.Add(shy - 1)); idle {
		t.Error("idle too early")
	}
	if _, idle := e.idleFor(m.began.Add(shy)); !idle {
		t.Error("not idle")
	}
	e.fresh = false
	if _, idle := e.idleFor(m.began); !idle {
		t.Error("one that had a request is not idle")
	}
}

// A multiplexed connection that got requests when it was leaving is cut at the
// deadline; another's requests were refused.
func TestLeavingAtTheDeadline(t *testing.T) {
	m := newModel(Options{}, 2)
	m.entries[1].way = &fake{multi: true}
	for _, e := range m.entries {
		if !e.letGo(m.began) {
			t.Fatal("not idle")
		}
		if _, _, ok := e.request(); ok != e.way.multiplexed() {
			t.Errorf("request accepted: %v", ok)
		}
	}
	if _, cut, _ := m.at(30*time.Second, 31*time.Second); cut != 1 || m.entries[1].leaving != leavingCut {
		t.Errorf("%d cut", cut)
	}
	if m.counts.Crossed != 1 {
		t.Errorf("%d crossed", m.counts.Crossed)
	}
}

func TestAllowed(t *testing.T) {
	for _, tc := range []struct {
		n               int
		elapsed, window time.Duration
		rate            float64
		want            int
	}{
		{10000, 0, 15 * time.Second, 500, 67},                         // 667 in a second
		{10000, 7500 * time.Millisecond, 15 * time.Second, 500, 5067}, // half of them after half the time
		{10000, 15 * time.Second, 15 * time.Second, 500, 10000},
		{1000, 0, 15 * time.Second, 500, 51}, // the rate is enough
		{1000, time.Second, 15 * time.Second, 500, 551},
		{1000, 2 * time.Second, 15 * time.Second, 500, 1000},
		{10, 0, 15 * time.Second, 500, 10},
		{3, 0, 15 * time.Second, 0.1, 1}, // there is always a first
		{5, 0, 0, 1, 5},
	} {
		if got := allowed(tc.n, tc.elapsed, tc.window, tc.rate); got != tc.want {
			t.Errorf("%+v: %d", tc, got)
		}
	}
}
