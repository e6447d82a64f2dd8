// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"instar/internal/pidfile"
	"instar/internal/testutil"
)

// stranger asks for an upgrade, and to take over, at the socket that it is told.
var stranger = testutil.NewProgram("stranger", func(c *testutil.Conversation) error {
	socket := c.Args[0]
	_, err := RequestUpgrade(context.Background(), socket)
	c.Send("%t %v", errors.Is(err, ErrPeer), err)
	_, err = RequestStatus(context.Background(), socket)
	c.Send("%t %v", errors.Is(err, ErrPeer), err)
	// Its own New would refuse the owner of the socket; this one does not look.
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return err
	}
	defer conn.Close()
	p, err := newPeer(conn)
	if err != nil {
		return err
	}
	// A refusal may come so early that it is sending that tells.
	err = p.send(frameHello, hello{MinVersion: minVersion, MaxVersion: maxVersion, PID: os.Getpid()})
	if err == nil {
		_, err = p.want(frameHello)
	}
	c.Send("%t %v", errors.Is(err, ErrPeer), err)
	options := Options{Socket: socket, Signals: []os.Signal{}}
	_, err = New(options)
	c.Send("%t %v", errors.Is(err, ErrPeer), err)
	return nil
})

// A process of another user gets nothing: no upgrade, no status, no descriptor. Nor
// does one take over from a stranger that sits at its socket.
func TestAnotherUser(t *testing.T) {
	testutil.NeedRoot(t)
	// Everybody may connect to an abstract socket.
	socket := fmt.Sprintf("@handover-test-%d-%s", os.Getpid(), t.Name())
	options := testOptions(t, socket)
	options.Command = []string{filepath.Join(t.TempDir(), "nothing")}
	first := mustStart(t, options, nil)
	p := stranger.Start(t, testutil.Options{As: testutil.Nobody(), Args: []string{socket}})
	for _, what := range []string{"upgrade", "status", "takeover", "takeover by New"} {
		answer := p.Recv()
		if !strings.HasPrefix(answer, "true ") || what != "takeover by New" && !strings.Contains(answer, "uid 65534") {
			t.Errorf("%s: %s", what, answer)
		}
	}
	if code := p.Wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if s := first.Status(); s.Upgrading || s.Phase != "active" {
		t.Errorf("status %+v", s)
	}
	// It is let in when the options name it.
	options.Socket += "-2"
	options.AllowUIDs = []int{65534}
	mustStart(t, options, nil)
	p = stranger.Start(t, testutil.Options{As: testutil.Nobody(), Args: []string{socket + "-2"}})
	p.Recv() // an upgrade needs a command
	if answer := p.Recv(); !strings.HasPrefix(answer, "false ") {
		t.Errorf("allowed one: %s", answer)
	}
	p.Kill()
}

// Looking at the status while an upgrade begins does not refuse it, and lifelines
// are not closed under it.
func TestStatusDuringUpgrades(t *testing.T) {
	socket := socketPath(t)
	options := func() Options {
		o := testOptions(t, socket)
		o.Probation, o.Logger = -1, nil
		return o
	}
	now := mustStart(t, options(), nil)
	stop := make(chan struct{})
	var mu sync.Mutex // of active
	active := now
	var watchers sync.WaitGroup
	for range 4 {
		watchers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				mu.Lock()
				g := active
				mu.Unlock()
				g.Status()
			}
		})
	}
	defer watchers.Wait()
	defer close(stop)
	for n := range testutil.UnlessShort(100, 10) {
		next, err := start(t, options(), nil)
		if err != nil {
			t.Fatalf("takeover %d: %v", n, err)
		}
		superseded(t, now)
		settled(t, next)
		mu.Lock()
		active = next
		mu.Unlock()
		now.stop()
		now = next
	}
}

// A successor that is taken back has to release its lease before the predecessor
// can have it: at no time two of them do (G5).
func TestLeaseComesBack(t *testing.T) {
	socket := socketPath(t)
	options := testOptions(t, socket)
	options.Probation = -1
	hold := make(chan struct{})
	options.step = func(step string, _ *peer) error {
		if step == "probation-over" {
			<-hold
			return errors.New("not good enough")
		}
		return nil
	}
	first := mustStart(t, options, nil)
	second := mustStart(t, testOptions(t, socket), nil)
	theirs, err := second.Lease(timeout(t, patience))
	if err != nil {
		t.Fatal(err)
	}
	if theirs.Context().Err() != nil {
		t.Error("the lease has ended before the rollback")
	}
	close(hold)
	<-second.Superseded()
	<-theirs.Context().Done()
	if cause := context.Cause(theirs.Context()); !errors.Is(cause, ErrRolledBack) {
		t.Errorf("the lease ended because of %v", cause)
	}
	settledUpgrade(t, first)
	if got := ask(t, first.l.Addr()); got != "1" {
		t.Errorf("generation %s answers", got)
	}
	got := make(chan error, 1)
	var released sync.Mutex
	released.Lock()
	go func() {
		l, err := first.Lease(timeout(t, patience))
		if err == nil {
			if released.TryLock() {
				released.Unlock()
			} else {
				err = errors.New("two have the lease")
			}
			l.Release()
		}
		got <- err
	}()
	// The predecessor serves already; its lease alone waits.
	first.mu.Lock()
	away := first.leaseAway
	first.mu.Unlock()
	if !away {
		t.Error("the lease is free while the successor has it")
	}
	released.Unlock()
	theirs.Release()
	if err := <-got; err != nil {
		t.Error(err)
	}
	second.stop()
}

// The PID file names the active process: from the commit on the successor, and the
// predecessor again when that fails. A successor that cannot write it gives up (F7).
func TestPIDFile(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "run")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	s := newService(t, appConfig{PIDFile: filepath.Join(folder, "app.pid")})
	owner := func(want int) {
		t.Helper()
		pid, owned, err := pidfile.Read(s.config.PIDFile)
		if err != nil || !owned || pid != want {
			t.Errorf("the PID file names %d (owned: %t), %v; want %d", pid, owned, err, want)
		}
	}
	first := s.up()
	owner(first.PID)
	for _, step := range []string{"commit", "activated", "committed", "ping"} {
		s.fault(fault{2, step, refuse})
		if _, err := s.upgrade(); err == nil {
			t.Errorf("%s: upgraded in spite of the fault", step)
		}
		testutil.WaitFor(t, patience, func() bool { st, err := s.status(); return err == nil && st.PID == first.PID && !st.Upgrading }, "the first to serve again")
		owner(first.PID)
	}
	// The folder is not there at the commit.
	if err := os.Rename(folder, folder+".away"); err != nil {
		t.Fatal(err)
	}
	_, err := s.upgrade()
	if err == nil || !strings.Contains(err.Error(), "write PID file") {
		t.Errorf("without the folder: %v", err)
	}
	if err := os.Rename(folder+".away", folder); err != nil {
		t.Fatal(err)
	}
	if pid := s.one(); pid != first.PID {
		t.Errorf("%d serves, not %d", pid, first.PID)
	}
	owner(first.PID)
	// The disk is full.
	testutil.NeedRoot(t)
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=4k,nr_inodes=3"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(small, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	full := newService(t, appConfig{PIDFile: filepath.Join(small, "app.pid")})
	one := full.up()
	if err := os.WriteFile(filepath.Join(small, "fill"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := full.upgrade(); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("on a full disk: %v", err)
	}
	if pid := full.one(); pid != one.PID {
		t.Errorf("%d serves, not %d", pid, one.PID)
	}
	if pid, owned, err := pidfile.Read(full.config.PIDFile); err != nil || !owned || pid != one.PID {
		t.Errorf("on a full disk the PID file names %d (%t), %v; want %d", pid, owned, err, one.PID)
	}
}

// Two first starts at the same moment: one is the first, and the other takes over
// from it.
func TestTwoFirstStarts(t *testing.T) {
	for _, kind := range []string{"path", "abstract"} {
		t.Run(kind, func(t *testing.T) {
			for n := range 10 {
				socket := socketPath(t)
				if kind == "abstract" {
					socket = fmt.Sprintf("@handover-test-%d-%s-%d", os.Getpid(), t.Name(), n)
				}
				var both sync.WaitGroup
				got := make([]*generation, 2)
				errs := make([]error, 2)
				for i := range got {
					both.Go(func() { got[i], errs[i] = start(t, testOptions(t, socket), nil) })
				}
				both.Wait()
				numbers := map[int]int{}
				for i, g := range got {
					if errs[i] != nil {
						t.Fatalf("start: %v", errs[i])
					}
					numbers[g.Generation()]++
				}
				if numbers[1] != 1 || numbers[2] != 1 {
					t.Errorf("generations %v", numbers)
				}
				for _, g := range got {
					if g.Generation() == 2 {
						settled(t, g)
						if a := ask(t, g.l.Addr()); a != "2" {
							t.Errorf("generation %s answers", a)
						}
					}
				}
			}
		})
	}
}
