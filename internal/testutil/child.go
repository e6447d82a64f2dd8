// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"instar/internal/capset"
)

const (
	childEnv      = "INSTAR_TEST_CHILD"       // the program's name
	childFilesEnv = "INSTAR_TEST_CHILD_FILES" // how many files were passed

	// Descriptors of a child. What the test passed follows.
	childInFD, childOutFD, childFilesFD = 3, 4, 5

	childTimeout = 30 * time.Second
	orphanGrace  = 10 * time.Second
)

// Program is a function of the test binary that runs as a process of its own.
type Program struct {
	name string
	run  func(*Conversation) error
}

var programs = map[string]*Program{}

// NewProgram names a function so that it can be started as a process. It is
// called where package variables are set, and panics when the name is taken.
//
// The process exits with 0 when run returns nil, with 1 and the error on the
// standard error when it returns one, and with 2 when it panics.
func NewProgram(name string, run func(*Conversation) error) *Program {
	if _, taken := programs[name]; taken {
		panic("testutil: two programs are named " + name)
	}
	p := &Program{name, run}
	programs[name] = p
	return p
}

// Conversation is what a program has of the test that started it.
type Conversation struct {
	// Args are those of Options.
	Args []string
	// Files are duplicates of those of Options, close-on-exec.
	Files []*os.File

	lines <-chan string
	mu    sync.Mutex
	out   *os.File
}

// Recv waits for the next line from the test. It returns false when the test
// closed the conversation or ended.
func (c *Conversation) Recv() (line string, ok bool) {
	line, ok = <-c.lines
	return line, ok
}

// Send sends a line to the test. It may be used by several goroutines.
func (c *Conversation) Send(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// A test that is gone needs no answer: Recv says so.
	_, _ = c.out.WriteString(oneLine(format, args...))
}

func oneLine(format string, args ...any) string {
	return strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " ") + "\n"
}

func runChild(name string) int {
	p := programs[name]
	if p == nil {
		fmt.Fprintf(os.Stderr, "no program is named %q\n", name)
		return 1
	}
	count, err := strconv.Atoi(os.Getenv(childFilesEnv))
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", childFilesEnv, err)
		return 1
	}
	// What this process executes is not a child of the test.
	for _, variable := range []string{childEnv, childFilesEnv} {
		if err := os.Unsetenv(variable); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	for fd := childInFD; fd < childFilesFD+count; fd++ {
		unix.CloseOnExec(fd)
	}
	lines := make(chan string, 64)
	c := &Conversation{Args: os.Args[1:], lines: lines, out: os.NewFile(childOutFD, "to test")}
	for i := range count {
		c.Files = append(c.Files, os.NewFile(uintptr(childFilesFD+i), fmt.Sprintf("file %d of the test", i)))
	}
	go func() {
		scan := bufio.NewScanner(os.NewFile(childInFD, "from test"))
		for scan.Scan() {
			lines <- scan.Text()
		}
		close(lines)
		// The test ended or was killed. No child stays behind.
		time.AfterFunc(orphanGrace, func() { os.Exit(3) })
	}()
	if err := p.run(c); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		return 1
	}
	return 0
}

// Options say how a program is started. The zero value works.
type Options struct {
	// Args are handed to the program.
	Args []string
	// Env is added to the environment of the test.
	Env []string
	// NS is the network namespace of the process. Default: that of the calling
	// goroutine.
	NS *Netns
	// As gives the process another user and exact capabilities. Default: those
	// of the test.
	As *Identity
	// Files are passed to the process, which finds duplicates in
	// Conversation.Files. They stay the caller's.
	Files []*os.File
	// Timeout limits each Recv and Wait. Default 30 s.
	Timeout time.Duration
}

// Identity is a user and the capabilities that its process has, none by
// default, for user 0 as well.
type Identity struct {
	UID, GID int
	Caps     []capset.Cap
}

// Nobody is an unprivileged user.
func Nobody() *Identity { return &Identity{UID: 65534, GID: 65534} }

// Process is a running program. Its methods belong to the test's goroutine and
// end the test when something is wrong. The process is killed when the test
// ends, with those of its descendants that stayed in its process group. What
// it prints goes to the test's log.
type Process struct {
	PID int

	t       testing.TB
	name    string
	timeout time.Duration
	cmd     *exec.Cmd
	in      *os.File // to the process
	out     *os.File // from the process
	lines   *bufio.Reader
	done    chan struct{} // closed when the process was waited for
}

// Start starts the program. The test is skipped when it lacks the privilege to
// give the process another identity.
func (p *Program) Start(t testing.TB, o Options) *Process {
	t.Helper()
	if !hooked {
		t.Fatal("a program needs a TestMain that calls testutil.Main")
	}
	if o.As != nil {
		Need(t, capset.SetUID, capset.SetGID, capset.Cap(unix.CAP_SETPCAP), capset.SysAdmin)
	}
	if o.Timeout == 0 {
		o.Timeout = childTimeout
	}

	var theirs []*os.File // the child's ends
	pipe := func() (r, w *os.File) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		return r, w
	}
	inR, inW := pipe()
	outR, outW := pipe()
	logR, logW := pipe()
	theirs = append(theirs, inR, outW, logW)

	cmd := exec.Command("/proc/self/exe", o.Args...)
	cmd.Args[0] = p.name
	cmd.Env = append(os.Environ(), o.Env...)
	// The race detector would have each process sleep for a second at its end.
	cmd.Env = append(cmd.Env, "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	cmd.Env = append(cmd.Env, childEnv+"="+p.name, fmt.Sprintf("%s=%d", childFilesEnv, len(o.Files)))
	cmd.Stdout, cmd.Stderr = logW, logW
	cmd.ExtraFiles = append([]*os.File{inR, outW}, o.Files...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}

	err := start(cmd, o.NS, o.As)
	for _, f := range theirs {
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatalf("start %s: %v", p.name, errors.Join(err, inW.Close(), outR.Close(), logR.Close()))
	}

	c := &Process{
		PID: cmd.Process.Pid, t: t, name: p.name, timeout: o.Timeout, cmd: cmd,
		in: inW, out: outR, lines: bufio.NewReader(outR), done: make(chan struct{}),
	}
	logged := make(chan struct{})
	go func() {
		defer close(logged)
		logLines(t, fmt.Sprintf("%s[%d]", p.name, c.PID), logR)
	}()
	go func() {
		defer close(c.done)
		_ = cmd.Wait() // the result is in cmd.ProcessState
	}()
	t.Cleanup(func() {
		// The group outlives its leader while it has members.
		_ = unix.Kill(-c.PID, unix.SIGKILL)
		<-c.done
		// What the process printed is in the pipe. Somebody who left the group
		// may still hold the other end.
		if err := logR.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			t.Error(err)
		}
		<-logged
		if err := errors.Join(logR.Close(), closeOnce(c.in), c.out.Close()); err != nil {
			t.Error(err)
		}
	})
	return c
}

// start starts cmd in the network namespace and with the identity.
func start(cmd *exec.Cmd, ns *Netns, as *Identity) error {
	if as == nil {
		if ns == nil {
			return cmd.Start()
		}
		var err error
		ns.Run(func() { err = cmd.Start() })
		return err
	}
	if as.UID != 0 || as.GID != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(as.UID), Gid: uint32(as.GID)}
	}
	if as.UID != 0 { // user 0 gets them when it executes
		for _, c := range as.Caps {
			cmd.SysProcAttr.AmbientCaps = append(cmd.SysProcAttr.AmbientCaps, uintptr(c))
		}
	}
	if ns != nil {
		return startLimited(cmd, ns.handle, capset.Of(as.Caps...))
	}
	here, err := netns.Get()
	if err != nil {
		return err
	}
	return errors.Join(startLimited(cmd, here, capset.Of(as.Caps...)), here.Close())
}

// startLimited starts cmd from a thread whose bounding set is limited to caps,
// so that executing a program gives user 0 no more than those.
func startLimited(cmd *exec.Cmd, ns netns.NsHandle, caps capset.Set) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := netns.Set(ns); err != nil {
			started <- fmt.Errorf("enter network namespace: %w", err)
			return
		}
		for c := capset.Cap(0); c <= capset.Last; c++ {
			if caps.Has(c) {
				continue
			}
			err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0)
			if err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: the kernel has no such capability
				started <- fmt.Errorf("drop %v: %w", c, err)
				return
			}
		}
		started <- cmd.Start()
	}()
	return <-started
}

func logLines(t testing.TB, prefix string, r io.Reader) {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			t.Logf("%s: %s", prefix, strings.TrimSuffix(line, "\n"))
		}
		if err != nil {
			return
		}
	}
}

func closeOnce(f *os.File) error {
	if err := f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Send sends a line to the process.
func (p *Process) Send(format string, args ...any) {
	p.t.Helper()
	if _, err := p.in.WriteString(oneLine(format, args...)); err != nil {
		p.t.Fatalf("send to %s: %v", p, err)
	}
}

// CloseSend ends the conversation: the process's Recv returns false. A process
// that does not end then is killed after a while.
func (p *Process) CloseSend() {
	p.t.Helper()
	if err := p.in.Close(); err != nil {
		p.t.Fatalf("close conversation with %s: %v", p, err)
	}
}

// Recv waits for the next line from the process.
func (p *Process) Recv() string {
	p.t.Helper()
	if err := p.out.SetReadDeadline(time.Now().Add(p.timeout)); err != nil {
		p.t.Fatal(err)
	}
	line, err := p.lines.ReadString('\n')
	switch {
	case errors.Is(err, io.EOF):
		p.t.Fatalf("%s ended the conversation (got %q before)", p, line)
	case errors.Is(err, os.ErrDeadlineExceeded):
		p.t.Fatalf("%s sent nothing for %v", p, p.timeout)
	case err != nil:
		p.t.Fatalf("receive from %s: %v", p, err)
	}
	return strings.TrimSuffix(line, "\n")
}

// Expect waits for the next line from the process, which has to be want.
func (p *Process) Expect(want string) {
	p.t.Helper()
	if got := p.Recv(); got != want {
		p.t.Fatalf("%s says %q, want %q", p, got, want)
	}
}

// Ask sends a line and waits for the next one.
func (p *Process) Ask(format string, args ...any) string {
	p.t.Helper()
	p.Send(format, args...)
	return p.Recv()
}

// Signal sends a signal to the process.
func (p *Process) Signal(sig os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatalf("send %v to %s: %v", sig, p, err)
	}
}

// Kill ends the process with SIGKILL and waits until it is gone.
func (p *Process) Kill() {
	p.t.Helper()
	p.Signal(unix.SIGKILL)
	p.Wait()
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits until the process ended by itself and returns its exit code, -1
// when a signal ended it.
func (p *Process) Wait() int {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(p.timeout):
		p.t.Fatalf("%s did not end within %v", p, p.timeout)
	}
	return p.cmd.ProcessState.ExitCode()
}

func (p *Process) String() string { return fmt.Sprintf("%s[%d]", p.name, p.PID) }
