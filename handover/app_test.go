// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

// appEnv makes the test binary a server: its appConfig in JSON.
const appEnv = "HANDOVER_TEST_APP"

// appConfig is the same for all generations of a server.
type appConfig struct {
	Dir       string // of the sockets
	Events    string // a unixgram socket that gets appEvents
	Build     string
	PIDFile   string
	Probation time.Duration
	Timeout   time.Duration
	// Faults is a file with the faults that are left: a process takes those of
	// its generation when it starts.
	Faults string
	State  int  // octets of state
	Child  bool // start a child at once
	Max    int  // generations
	// NoSignals leaves signals to the application, which tells of SIGUSR2.
	NoSignals bool
}

// control is the path of the control socket. The test may change it between
// generations.
func (c appConfig) control() string {
	name, err := os.ReadFile(filepath.Join(c.Dir, "control-name"))
	if err != nil {
		name = []byte("control")
	}
	return filepath.Join(c.Dir, string(name))
}

// fault is what goes wrong in a generation.
type fault struct {
	Generation int
	Step       string // of Options.step
	Kind       faultKind
}

type faultKind string

const (
	kill    faultKind = "kill"    // SIGKILL
	stop    faultKind = "stop"    // SIGSTOP
	slow    faultKind = "slow"    // 300 ms
	refuse  faultKind = "refuse"  // an error of the application
	garbage faultKind = "garbage" // octets that are no frame
	hold    faultKind = "hold"    // until service.letGo
)

// appEvent is what a server tells the test.
type appEvent struct {
	Generation int
	PID        int
	What       string // "new", "ready", "superseded", "end", "fault", "signal"
	Detail     string
	FDs        int
	Goroutines int
	Memory     uint64 // the heap after a collection
}

// appMain is the server. It answers a connection that sends "who\n" with its
// generation and pid, again and again until the client closes.
func appMain(text string) int {
	var c appConfig
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	events, err := net.Dial("unixgram", c.Events)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	defer events.Close()
	var generation atomic.Int64
	tell := func(what string, detail any) {
		fds, _ := os.ReadDir("/proc/self/fd")
		e := appEvent{Generation: int(generation.Load()), PID: os.Getpid(), What: what, Detail: fmt.Sprint(detail), FDs: len(fds), Goroutines: runtime.NumGoroutine()}
		if what == "measure" {
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			e.Memory = m.HeapAlloc
		}
		b, _ := json.Marshal(e)
		_, _ = events.Write(b)
	}
	if err := app(c, &generation, tell); err != nil {
		tell("end", err)
		return 1
	}
	tell("end", "")
	return 0
}

func app(c appConfig, generation *atomic.Int64, tell func(string, any)) error {
	stopped := make(chan os.Signal, 1)
	signal.Notify(stopped, syscall.SIGTERM)
	var h *Handover
	options := Options{
		Name: "app", Build: strings.TrimPrefix(c.Build, "-"), Socket: c.control(), PIDFile: c.PIDFile,
		MaxGenerations: c.Max,
		Probation:      c.Probation, UpgradeTimeout: c.Timeout, CommitTimeout: c.Timeout,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	if c.NoSignals {
		options.Signals = []os.Signal{}
		own := make(chan os.Signal, 1)
		signal.Notify(own, syscall.SIGUSR2)
		go func() {
			for s := range own {
				tell("signal", s)
			}
		}()
	}
	// A successor does not know its generation before HELLO.
	guess := 1
	if text, err := os.ReadFile(filepath.Join(c.Dir, "generation")); err == nil {
		guess, _ = strconv.Atoi(string(text))
		guess++
	}
	options.step = func(step string, p *peer) error {
		number := int(generation.Load())
		if number == 0 {
			number = guess
		}
		kind := takeFault(c.Faults, number, step)
		if kind == "" {
			return nil
		}
		tell("fault", step+" "+string(kind))
		switch kind {
		case kill:
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		case stop:
			// To this thread: one to the process may find another one, and this one
			// goes on a little, far enough to answer.
			runtime.LockOSThread()
			_ = unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGSTOP)
			runtime.UnlockOSThread()
		case slow:
			time.Sleep(300 * time.Millisecond)
		case refuse:
			return errors.New("refused by the test")
		case garbage:
			_, _ = p.conn.Write([]byte("this is no frame"))
		case hold:
			f, err := os.Open(fmt.Sprintf("%s.%d.%s.fifo", c.Faults, number, step))
			if err != nil {
				return err
			}
			return f.Close()
		}
		return nil
	}
	h, err := New(options)
	if err != nil {
		return err
	}
	defer h.Close()
	generation.Store(int64(h.Generation()))
	tell("new", "")
	h.mu.Lock()
	older := len(h.older)
	h.mu.Unlock()
	tell("measure", older)
	web, err := h.Listen("web", "tcp", c.address())
	if err != nil {
		return err
	}
	local, err := h.Listen("local", "unix", filepath.Join(c.Dir, "local"))
	if err != nil {
		return err
	}
	if c.State > 0 {
		h.OnHandover(func(_ context.Context, w io.Writer) error {
			_, err := w.Write(make([]byte, c.State))
			return err
		})
		if s := h.State(); s != nil {
			n, err := io.Copy(io.Discard, s)
			if err == nil && n != int64(c.State) {
				err = fmt.Errorf("state of %d bytes", n)
			}
			if err != nil && !errors.Is(err, errPeerGone) {
				return err
			}
		}
	}
	var conns, loops sync.WaitGroup
	var open atomic.Int64
	for _, l := range []net.Listener{web, local} {
		loops.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				open.Add(1)
				conns.Go(func() {
					defer open.Add(-1)
					defer conn.Close()
					for r := bufio.NewReader(conn); ; {
						if _, err := r.ReadString('\n'); err != nil {
							return
						}
						// A client that is told so goes to the successor.
						last := ""
						if h.Err() != nil {
							last = " last"
						}
						if _, err := fmt.Fprintf(conn, "%d %d%s\n", h.Generation(), os.Getpid(), last); err != nil || last != "" {
							return
						}
					}
				})
			}
		})
	}
	if err := options.step("listening", nil); err != nil {
		return err
	}
	if err := h.Ready(context.Background()); err != nil {
		return err
	}
	if c.Child {
		child := exec.Command("sleep", "100")
		if err := child.Start(); err != nil {
			return err
		}
		defer func() { _ = child.Process.Kill() }()
		tell("child", child.Process.Pid)
	}
	_ = os.WriteFile(filepath.Join(c.Dir, "generation"), []byte(strconv.Itoa(h.Generation())), 0o600)
	tell("ready", "")
	select {
	case <-h.Superseded():
		tell("superseded", h.Err())
		if errors.Is(h.Err(), ErrRolledBack) {
			err = h.Err()
		}
	case <-stopped:
		_ = h.Close()
	}
	loops.Wait() // what was accepted last counts
	for deadline := time.Now().Add(10 * time.Second); open.Load() > 0 && time.Now().Before(deadline); {
		select {
		case <-stopped:
			deadline = time.Now()
		case <-h.Hurried():
			deadline = time.Now()
		case <-time.After(5 * time.Millisecond):
		}
	}
	return err
}

// address is the same for all generations: a port that the test reserved.
func (c appConfig) address() string {
	text, _ := os.ReadFile(filepath.Join(c.Dir, "address"))
	return string(text)
}

// takeFault finds a fault and removes it: it strikes once.
func takeFault(path string, generation int, step string) faultKind {
	name := fmt.Sprintf("%s.%d.%s", path, generation, step)
	kind, err := os.ReadFile(name)
	if err != nil || os.Remove(name) != nil {
		return ""
	}
	return faultKind(kind)
}

// service is a server of processes, with a network namespace of its own.
type service struct {
	t        testing.TB
	ns       *testutil.Netns
	config   appConfig
	addr     string
	path     string     // of the executable
	files    []*os.File // that the first process inherits, from 3 on
	ownGroup bool       // the processes are a process group of their own

	mu     sync.Mutex
	events []appEvent
	change chan struct{}
}

func newService(t testing.TB, config appConfig) *service {
	t.Helper()
	s := &service{t: t, ns: testutil.NetNS(t), config: config, change: make(chan struct{})}
	dir, err := os.MkdirTemp("", "handover")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s.config.Dir, s.config.Events, s.config.Faults = dir, filepath.Join(dir, "events"), filepath.Join(dir, "fault")
	if s.config.Build == "" {
		s.config.Build = "one"
	}
	if s.config.Probation == 0 {
		s.config.Probation = 100 * time.Millisecond
	}
	if s.config.Timeout == 0 {
		s.config.Timeout = 20 * time.Second
	}
	s.addr = "127.0.0.1:7000"
	if err := os.WriteFile(filepath.Join(dir, "address"), []byte(s.addr), 0o600); err != nil {
		t.Fatal(err)
	}
	s.path, err = os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	events, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: s.config.Events, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	var reader sync.WaitGroup
	reader.Go(func() {
		b := make([]byte, 64<<10)
		for {
			n, err := events.Read(b)
			if err != nil {
				return
			}
			var e appEvent
			if err := json.Unmarshal(b[:n], &e); err != nil {
				t.Errorf("event %q: %v", b[:n], err)
				continue
			}
			t.Logf("event: generation %d, pid %d: %s %s", e.Generation, e.PID, e.What, e.Detail)
			s.mu.Lock()
			s.events = append(s.events, e)
			close(s.change)
			s.change = make(chan struct{})
			s.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		s.killAll()
		_ = events.Close()
		reader.Wait()
	})
	return s
}

// killAll ends every process that told its pid, as long as it is one of ours.
func (s *service) killAll() {
	s.mu.Lock()
	pids := map[int]bool{}
	for _, e := range s.events {
		pids[e.PID] = true
	}
	s.mu.Unlock()
	for pid := range pids {
		if s.lives(pid) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			testutil.WaitFor(s.t, patience, func() bool { return !s.lives(pid) }, "the end of %d", pid)
		}
	}
}

// lives says whether the process is one of this service, and not a zombie.
func (s *service) lives(pid int) bool {
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	return err == nil && strings.Contains(string(env), s.config.Dir)
}

// fault arms one.
func (s *service) fault(f fault) {
	s.t.Helper()
	name := fmt.Sprintf("%s.%d.%s", s.config.Faults, f.Generation, f.Step)
	if f.Kind == hold {
		if err := unix.Mkfifo(name+".fifo", 0o600); err != nil {
			s.t.Fatal(err)
		}
	}
	if err := os.WriteFile(name, []byte(f.Kind), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// held arms a fault that holds a generation at a step.
func (s *service) held(generation int, step string) fault {
	s.t.Helper()
	f := fault{generation, step, hold}
	s.fault(f)
	return f
}

// awaitHeld waits until the process is there.
func (s *service) awaitHeld(f fault) appEvent {
	s.t.Helper()
	return s.await(0, "a process at step "+f.Step, func(e appEvent) bool { return e.What == "fault" && e.Detail == f.Step+" "+string(hold) })
}

// letGo ends a fault that holds.
func (s *service) letGo(f fault) {
	s.t.Helper()
	name := fmt.Sprintf("%s.%d.%s.fifo", s.config.Faults, f.Generation, f.Step)
	testutil.WaitFor(s.t, patience, func() bool {
		// Only with a reader it can be opened (fifo(7)).
		fd, err := unix.Open(name, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		return err == nil && unix.Close(fd) == nil
	}, "a process that is held at step %s", f.Step)
}

// start starts a process from outside, as a shell would.
func (s *service) start() {
	s.t.Helper()
	text, err := json.Marshal(s.config)
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := s.ns.Command(s.path)
	cmd.Env = append(os.Environ(), appEnv+"="+string(text))
	out, err := os.CreateTemp(s.config.Dir, "log")
	if err != nil {
		s.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.ExtraFiles = s.files
	// All generations are in the group of the first one. Otherwise they are in the
	// test's, and end with it when somebody interrupts it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: s.ownGroup}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	var wait sync.WaitGroup
	wait.Go(func() { _ = cmd.Wait() })
	s.t.Cleanup(func() {
		s.killAll()
		wait.Wait()
		_ = out.Close()
		if log, err := os.ReadFile(out.Name()); err == nil && s.t.Failed() {
			s.t.Logf("log of the processes:\n%s", log)
		}
	})
}

// await returns the first event that fits, from index on.
func (s *service) await(from int, what string, fits func(appEvent) bool) appEvent {
	s.t.Helper()
	timeout := time.After(patience)
	for {
		s.mu.Lock()
		for _, e := range s.events[min(from, len(s.events)):] {
			if fits(e) {
				s.mu.Unlock()
				return e
			}
		}
		change := s.change
		s.mu.Unlock()
		select {
		case <-change:
		case <-timeout:
			s.t.Fatalf("no event: %s", what)
		}
	}
}

// up starts the first generation and waits until it serves.
func (s *service) up() appEvent {
	s.t.Helper()
	s.start()
	return s.await(0, "the first is ready", func(e appEvent) bool { return e.What == "ready" })
}

func (s *service) status() (Status, error) {
	return RequestStatus(s.t.Context(), s.config.control())
}

func (s *service) upgrade() (Status, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), 3*patience)
	defer cancel()
	return RequestUpgrade(ctx, s.config.control())
}

// client asks all the time over new connections, in the namespace.
type client struct {
	s       *service
	stop    chan struct{}
	done    sync.WaitGroup
	asked   atomic.Int64
	refused atomic.Int64
	reset   atomic.Int64
	other   atomic.Int64
	mu      sync.Mutex
	errors  []string
	by      map[int]int // pid -> answers
}

func (s *service) client(parallel int) *client {
	c := &client{s: s, stop: make(chan struct{}), by: map[int]int{}}
	for i := range parallel {
		c.done.Go(func() {
			s.ns.Run(func() {
				for n := 0; ; n++ {
					select {
					case <-c.stop:
						return
					default:
					}
					_, pid, err := s.who(fmt.Sprintf("127.0.%d.%d", i, n/1000%250+1))
					c.asked.Add(1)
					c.count(pid, err)
					time.Sleep(500 * time.Microsecond)
				}
			})
		})
	}
	s.t.Cleanup(func() { c.end() })
	return c
}

func (c *client) count(pid int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.by[pid]++
		return
	}
	c.errors = append(c.errors, err.Error())
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		c.refused.Add(1)
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, io.EOF):
		c.reset.Add(1)
	default:
		c.other.Add(1)
	}
}

func (c *client) end() {
	select {
	case <-c.stop:
	default:
		close(c.stop)
	}
	c.done.Wait()
}

// lost returns what failed.
func (c *client) lost() int64 { return c.refused.Load() + c.reset.Load() + c.other.Load() }

// who asks once; its caller is in the namespace.
func (s *service) who(from string) (generation, pid int, err error) {
	d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp", s.addr)
	if err != nil {
		return 0, 0, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "who\n"); err != nil {
		return 0, 0, err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return 0, 0, err
	}
	_, err = fmt.Sscan(line, &generation, &pid)
	return generation, pid, err
}

// one makes sure that exactly one process answers, and returns its pid.
func (s *service) one() (pid int) {
	s.t.Helper()
	pids := map[int]bool{}
	s.ns.Run(func() {
		for range 40 {
			_, pid, err := s.who("127.0.0.1")
			if err != nil {
				s.t.Errorf("nobody serves: %v", err)
				return
			}
			pids[pid] = true
		}
	})
	for p := range pids {
		pid = p
	}
	if len(pids) > 1 {
		s.t.Errorf("processes %v serve", pids)
	}
	return pid
}

// keep holds a connection and asks on it again and again; a new one when the
// server says that this was the last answer.
func (c *client) keep(from string, every time.Duration) {
	c.done.Go(func() {
		dial := func() (conn net.Conn, err error) {
			d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
			c.s.ns.Run(func() { conn, err = d.Dial("tcp", c.s.addr) })
			return conn, err
		}
		var conn net.Conn
		var r *bufio.Reader
		defer func() {
			if conn != nil {
				_ = conn.Close()
			}
		}()
		for {
			if conn == nil {
				var err error
				if conn, err = dial(); err != nil {
					c.count(0, err)
					return
				}
				_ = conn.SetDeadline(time.Now().Add(10 * patience))
				r = bufio.NewReader(conn)
			}
			_, err := io.WriteString(conn, "who\n")
			var line string
			if err == nil {
				line, err = r.ReadString('\n')
			}
			var generation, pid int
			if err == nil {
				_, err = fmt.Sscan(line, &generation, &pid)
			}
			c.asked.Add(1)
			c.count(pid, err)
			if err != nil {
				return
			}
			if strings.HasSuffix(line, " last\n") {
				_ = conn.Close()
				conn = nil
			}
			select {
			case <-c.stop:
				return
			case <-time.After(every):
			}
		}
	})
}
