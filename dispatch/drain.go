// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

const (
	defaultGrace = 20 * time.Millisecond
	// queuePoll is how often the queues of a leaving generation are looked at.
	queuePoll = time.Millisecond
	// countFlowsEvery is how often a draining generation counts its flows.
	countFlowsEvery = time.Second
)

// ErrUnread ends a drain whose sockets still hold datagrams, or connections, that nobody
// takes.
var ErrUnread = errors.New("a queue is not empty and nobody reads it")

// Drain ends the generation's part in the group with nothing lost. It waits until the
// options say that the drain is over, takes the sockets out of the map, waits for
// packets that the kernel had assigned already, and returns when the owner, who goes on
// reading meanwhile, has read the queues to the end. The owner then ends its flows and
// calls Close. A draining generation stays in the order of last resort until it leaves
// the map.
//
// With TCP, connections that wait at the listeners move to the active generation when
// they close; Drain waits until the owner has accepted them all only when no other
// generation is there. What was accepted before is the owner's to end, before or after.
//
// Draining the active generation, with DrainOptions.Final, is how a service ends: if
// other generations hold sockets then, the one that was active before is active again.
//
// When ctx ends first, Drain returns its error and the generation stays as it is; it can
// drain again. Other errors: ErrReinstated when the generation is active (again) and
// Final is not set, ErrUnread when the owner stopped reading for 5 s.
func (n *Generation) Drain(ctx context.Context, o DrainOptions) (DrainReport, error) {
	if o.Grace == 0 {
		o.Grace = defaultGrace
	}
	start := time.Now()
	report := DrainReport{}
	fail := func(err error) (DrainReport, error) {
		report.Waited = time.Since(start)
		return report, fmt.Errorf("drain generation %d of %s: %w", n.number, n.group.key, err)
	}
	if o.Deadline > 0 {
		if err := n.announceDeadline(start.Add(o.Deadline), o.Final); err != nil {
			return fail(err)
		}
	}
	reason, err := n.awaitDrained(ctx, o)
	if err != nil {
		return fail(err)
	}
	report.Reason = reason
	if Steering(n.group.table.Steering) == SteeringFlow {
		if report.Flows, err = n.liveFlows(); err != nil {
			return fail(err)
		}
	}
	report.Waited = time.Since(start)
	err = n.group.update(func() error {
		slot, ok := n.group.table.find(n.number)
		if !ok {
			return nil
		}
		if !o.Final && n.State() == StateActive {
			return ErrReinstated
		}
		n.group.leave(slot)
		return nil
	})
	if err != nil {
		return fail(err)
	}
	// Now, and not with Close alone: the process may be killed before.
	giveUpPreference(n.sockets...)
	if err := sleep(ctx, o.Grace); err != nil {
		return fail(err)
	}
	report.Queued, err = n.readToEnd(ctx)
	if err != nil {
		return fail(err)
	}
	n.group.log.Info("generation has drained", "group", n.group.key.String(), "generation", n.number,
		"reason", report.Reason, "waited", report.Waited)
	return report, nil
}

// announceDeadline writes the deadline into the table, where everybody sees it, unless an
// earlier one is there.
func (n *Generation) announceDeadline(at time.Time, final bool) error {
	return n.group.update(func() error {
		if !final && n.State() == StateActive {
			return ErrReinstated
		}
		info := &n.group.table.Info[n.slot]
		deadline := max(1, uint64(int64(now())+int64(time.Until(at))))
		if info.Number == n.number && (info.Deadline == 0 || deadline < info.Deadline) {
			info.Deadline = deadline
		}
		return nil
	})
}

// awaitDrained waits for the end of the drain and says what ended it.
func (n *Generation) awaitDrained(ctx context.Context, o DrainOptions) (string, error) {
	var count time.Time // of flows, the next
	for {
		changed, err := n.group.watch.next()
		if err != nil {
			return "", err
		}
		switch s := n.State(); {
		case s == StateGone:
			return "evicted", nil
		case s == StateActive && !o.Final:
			return "", ErrReinstated
		}
		wait := time.Duration(1<<63 - 1)
		if info := &n.group.table.Info[n.slot]; info.Number == n.number && info.Deadline != 0 {
			left := time.Duration(int64(info.Deadline) - int64(now()))
			if left <= 0 {
				return "deadline", nil
			}
			wait = left
		}
		if o.Idle > 0 {
			idle, err := n.idle()
			if err != nil {
				return "", err
			}
			if idle >= o.Idle {
				return "idle", nil
			}
			wait = min(wait, o.Idle-idle)
		}
		if Steering(n.group.table.Steering) == SteeringFlow {
			if start := time.Now(); !start.Before(count) {
				live, err := n.liveFlows()
				if err != nil {
					return "", err
				}
				if live == 0 {
					return "flows ended", nil
				}
				// A large table takes its time: a twentieth of ours at most.
				count = start.Add(max(countFlowsEvery, 20*time.Since(start)))
			}
			wait = min(wait, time.Until(count))
		}
		timer := time.NewTimer(wait)
		select {
		case <-o.Done:
			timer.Stop()
			return "done", nil
		case <-ctx.Done():
			timer.Stop()
			return "", ctx.Err()
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// idle is how long no packet came, counted from when the generation joined.
func (n *Generation) idle() (time.Duration, error) {
	release, err := n.group.use()
	if err != nil {
		return 0, err
	}
	defer release()
	traffic, err := n.group.traffic()
	if err != nil {
		return 0, err
	}
	last := max(traffic[n.slot].last, n.group.table.Info[n.slot].Joined)
	return time.Duration(int64(now()) - int64(last)), nil
}

// readToEnd waits until the owner's reader has emptied every queue, and counts those
// that were not empty at first.
func (n *Generation) readToEnd(ctx context.Context) (queued int, err error) {
	if slots, _ := n.group.table.order(); n.group.key.protocol() == tcp && len(slots) > 0 {
		return 0, nil // what waits will move
	}
	for _, s := range n.sockets {
		if _, waiting := peek(s); waiting {
			queued++
		}
	}
	step("count queues")
	for _, s := range n.sockets {
		first, waiting := peek(s)
		since := time.Now()
		for waiting {
			if err := sleep(ctx, queuePoll); err != nil {
				return queued, err
			}
			var next head
			next, waiting = peek(s)
			if next != first {
				first, since = next, time.Now()
			}
			if waiting && time.Since(since) > unreadLimit {
				return queued, fmt.Errorf("%w: %s on %s; keep reading until Drain returns", ErrUnread, first, addressOf(s))
			}
		}
	}
	return queued, nil
}

// head is what a reader of a socket would get next, and the memory of the queue: when it
// changes somebody reads. The memory alone does not tell, since the kernel gives it back
// in steps of a quarter of the receive buffer (udp_rmem_release in net/ipv4/udp.c).
// Of a listener it is how many connections wait to be accepted.
type head struct {
	memory      uint32
	size        int
	octets      [64]byte
	connections uint32
}

func (h head) String() string {
	if h.connections > 0 {
		return fmt.Sprintf("%d connections", h.connections)
	}
	return fmt.Sprintf("%d bytes", h.memory)
}

func addressOf(s socket) net.Addr {
	switch s := s.(type) {
	case *net.TCPListener:
		return s.Addr()
	case *net.UDPConn:
		return s.LocalAddr()
	}
	return nil
}

// peek reports whether a datagram or connection waits on the socket, and which. A closed
// socket has none.
func peek(s socket) (h head, waiting bool) {
	if isTCP(s) {
		_ = rawconn.Of(s, func(fd int) error {
			// Of a listener, tcpi_unacked is that (tcp_get_info in net/ipv4/tcp.c).
			info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			if err == nil {
				h.connections = info.Unacked
			}
			return err
		})
		return h, h.connections > 0
	}
	_ = rawconn.Of(s, func(fd int) error {
		n, _, err := unix.Recvfrom(fd, h.octets[:], unix.MSG_PEEK|unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		// Another error was pending, and this call took it. The next one sees what is behind.
		waiting = !errors.Is(err, unix.EAGAIN)
		if err == nil {
			h.size, h.memory = n, receiveMemory(fd)
		}
		return err
	})
	return h, waiting
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
