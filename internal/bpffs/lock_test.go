// SPDX-License-Identifier: Apache-2.0

package bpffs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

// folder makes a folder on a bpffs where that is possible, on another file
// system otherwise.
func folder(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if os.Geteuid() == 0 {
		dir = testutil.BPFFS(t)
	}
	dir = filepath.Join(dir, "group")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// ended is a context whose time has come: Acquire tries once.
func ended(t testing.TB) context.Context {
	ctx, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	t.Cleanup(cancel)
	return ctx
}

func mustAcquire(t testing.TB, dir string, exclusive bool) *Lock {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	l, err := Acquire(ctx, dir, exclusive)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func mustUnlock(t testing.TB, locks ...*Lock) {
	t.Helper()
	for _, l := range locks {
		if err := l.Unlock(); err != nil {
			t.Fatal(err)
		}
	}
}

// locker locks a folder, tells of it, and unlocks it when it is told to.
var locker = testutil.NewProgram("locker", func(c *testutil.Conversation) error {
	l, err := Acquire(context.Background(), c.Args[0], c.Args[1] == "exclusive")
	if err != nil {
		return err
	}
	c.Send("locked")
	if _, ok := c.Recv(); !ok {
		return nil
	}
	if err := l.Unlock(); err != nil {
		return err
	}
	c.Send("unlocked")
	c.Recv()
	return nil
})

func TestExclusion(t *testing.T) {
	for _, tc := range []struct {
		have, want string
		works      bool
	}{
		{"exclusive", "exclusive", false},
		{"exclusive", "shared", false},
		{"shared", "exclusive", false},
		{"shared", "shared", true},
	} {
		t.Run(tc.want+" while "+tc.have, func(t *testing.T) {
			dir := folder(t)
			p := locker.Start(t, testutil.Options{Args: []string{dir, tc.have}})
			p.Expect("locked")
			l, err := Acquire(ended(t), dir, tc.want == "exclusive")
			if tc.works {
				if err != nil {
					t.Fatal(err)
				}
				mustUnlock(t, l)
			} else {
				var busy *BusyError
				if !errors.As(err, &busy) || !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("%v, %v; want a BusyError", l, err)
				}
				if want := []Holder{{p.PID, "exe"}}; busy.Dir != dir || !slices.Equal(busy.Holders, want) {
					t.Errorf("%+v, want holders %v", busy, want)
				}
				want := fmt.Sprintf("lock %s: context deadline exceeded: held by exe (pid %d); try again when it is done", dir, p.PID)
				if err.Error() != want {
					t.Errorf("%q, want %q", err, want)
				}
			}
			// Unlocking is enough: the process goes on.
			if got := p.Ask("unlock"); got != "unlocked" {
				t.Fatal(got)
			}
			l, err = Acquire(ended(t), dir, tc.want == "exclusive")
			if err != nil {
				t.Fatal(err)
			}
			mustUnlock(t, l)
		})
	}
}

// A process that is killed holds no lock.
func TestKilledHolder(t *testing.T) {
	dir := folder(t)
	p := locker.Start(t, testutil.Options{Args: []string{dir, "exclusive"}})
	p.Expect("locked")
	p.Kill()
	l, err := Acquire(ended(t), dir, true)
	if err != nil {
		t.Fatal(err)
	}
	mustUnlock(t, l)
}

// Two in one process exclude each other, too, and one that waits gets it.
func TestWaits(t *testing.T) {
	dir := folder(t)
	first := mustAcquire(t, dir, true)
	var mu sync.Mutex
	unlocked := false
	got := make(chan error, 1)
	go func() {
		l, err := Acquire(t.Context(), dir, true)
		if err != nil {
			got <- err
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if !unlocked {
			err = errors.New("the second lock was had before the first one ended")
		}
		got <- errors.Join(err, l.Unlock())
	}()
	// Others are refused meanwhile.
	if _, err := Acquire(ended(t), dir, false); err == nil {
		t.Error("a reader got in")
	}
	mu.Lock()
	unlocked = true
	mustUnlock(t, first)
	mu.Unlock()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestMutualExclusion(t *testing.T) {
	dir := folder(t)
	var inside, rounds atomic.Int32 // the race detector does not know this lock
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 20 {
				l, err := Acquire(t.Context(), dir, true)
				if err != nil {
					t.Error(err)
					return
				}
				if n := inside.Add(1); n != 1 {
					t.Errorf("%d inside", n)
				}
				runtime.Gosched()
				rounds.Add(1)
				inside.Add(-1)
				if err := l.Unlock(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := rounds.Load(); got != 80 {
		t.Errorf("%d rounds, want 80", got)
	}
}

func TestCancel(t *testing.T) {
	dir := folder(t)
	l := mustAcquire(t, dir, true)
	defer mustUnlock(t, l)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("the operator went home")
	cancel(why)
	var busy *BusyError
	if _, err := Acquire(ctx, dir, true); !errors.As(err, &busy) || !errors.Is(err, why) {
		t.Errorf("%v, want a BusyError with the cause", err)
	}
	if len(busy.Holders) != 1 || busy.Holders[0].PID != os.Getpid() {
		t.Errorf("holders %v, want this process", busy.Holders)
	}
	if got, want := (&BusyError{Dir: "/x", Err: context.Canceled}).Error(),
		"lock /x: context canceled: held by a process of another PID namespace; try again when it is done"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// The folder that has the name is the one that is locked.
func TestReplacedWhileWaiting(t *testing.T) {
	dir := folder(t)
	first := mustAcquire(t, dir, true)
	got := make(chan *Lock, 1)
	go func() {
		l, err := Acquire(t.Context(), dir, true)
		if err != nil {
			t.Error(err)
		}
		got <- l
	}()
	aside := filepath.Join(filepath.Dir(dir), "aside")
	if err := errors.Join(os.Mkdir(aside, 0o755), unix.Rename(aside, dir)); err != nil {
		t.Fatal(err)
	}
	second := <-got
	if second == nil {
		mustUnlock(t, first)
		return
	}
	// The first lock is still held, on a folder without a name.
	mine, err := second.dir.Stat()
	if err != nil {
		t.Fatal(err)
	}
	current, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(mine, current) {
		t.Error("the lock is on the folder that was removed")
	}
	if l, err := Acquire(ended(t), dir, true); err == nil {
		t.Error("it was had twice")
		mustUnlock(t, l)
	}
	mustUnlock(t, first, second)
}

func TestAcquireRefuses(t *testing.T) {
	dir := folder(t)
	if _, err := Acquire(t.Context(), dir+"-none", true); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no folder: %v", err)
	}
	l := mustAcquire(t, dir, true)
	mustUnlock(t, l)
	if err := l.Unlock(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("unlocked twice: %v", err)
	}
}

// A file can be locked by way of a descriptor that several processes share, and they
// exclude each other all the same.
func TestFile(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	path := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	l := mustAcquire(t, path, true)
	if _, err := Acquire(ended(t), path, true); !errors.As(err, new(*BusyError)) {
		t.Errorf("while it is locked: %v", err)
	}
	mustUnlock(t, l)
	mustUnlock(t, mustAcquire(t, path, true))
}

// A folder that is removed while somebody waits is gone, not busy.
func TestRemovedWhileWaiting(t *testing.T) {
	dir := folder(t)
	first := mustAcquire(t, dir, true)
	got := make(chan error, 1)
	go func() {
		_, err := Acquire(t.Context(), dir, true)
		got <- err
	}()
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	mustUnlock(t, first)
	if err := <-got; !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want fs.ErrNotExist", err)
	}
}

// The descriptor is not inherited: what the holder executes holds no lock.
func TestCloseOnExec(t *testing.T) {
	testutil.NeedCommand(t, "ls", "coreutils")
	dir := folder(t)
	l := mustAcquire(t, dir, true)
	defer mustUnlock(t, l)
	p := lister.Start(t, testutil.Options{})
	if got := p.Recv(); strings.Contains(got, dir) {
		t.Errorf("a child has %s open: %s", dir, got)
	}
}

var lister = testutil.NewProgram("lister", func(c *testutil.Conversation) error {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	var targets []string
	for _, fd := range fds {
		if target, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil {
			targets = append(targets, target)
		}
	}
	c.Send("%s", targets)
	return nil
})

func TestLockers(t *testing.T) {
	locks := []byte(`1: FLOCK  ADVISORY  WRITE 1234 00:1d:5678 0 EOF
1: -> FLOCK  ADVISORY  WRITE 1235 00:1d:5678 0 EOF
2: FLOCK  ADVISORY  READ 1236 00:1d:5678 0 EOF
3: POSIX  ADVISORY  WRITE 1237 00:1d:5678 0 EOF
4: FLOCK  ADVISORY  WRITE 1238 00:1d:567 0 EOF
5: FLOCK  ADVISORY  WRITE 1239 fe:00:5678 0 EOF
6: FLOCK  ADVISORY  WRITE 0 00:1d:5678 0 EOF
7: FLOCK  ADVISORY  WRITE -1 00:1d:5678 0 EOF
8: FLOCK
`)
	if got, want := lockers(locks, 0, 0x1d, 5678), []int{1234, 1236}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := lockers(locks, 0, 0x1d, 1); got != nil {
		t.Errorf("%v, want none", got)
	}
}
