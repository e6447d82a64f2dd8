// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"instar/dispatch"
	"instar/handover"
	"instar/internal/testutil"
	"instar/quicdemo"
)

const (
	address = "127.0.0.1:4433"
	// patience is for machines with much else to do: the clients take some
	// seconds, and many times as long where each packet waits for its turn.
	patience = time.Minute
)

func TestMain(m *testing.M) { testutil.Main(m) }

// site is where the programs of a test are: a network namespace with nothing
// but lo, a folder for groups, and a folder with the commands that everybody
// may execute.
type site struct {
	t        testing.TB
	ns       *testutil.Netns
	root     string
	commands string
}

// newSite makes a site with these commands. They are built as users build them:
// with the race detector a machine that is busy anyway takes seconds for a
// handshake.
func newSite(t testing.TB, commands ...string) *site {
	t.Helper()
	testutil.NeedRoot(t)
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", dir+"/")
	for _, command := range commands {
		build.Args = append(build.Args, "instar/cmd/"+command)
	}
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}
	// t.TempDir makes the folder above for the test's user only.
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	return &site{t, testutil.NetNS(t), testutil.BPFFS(t), dir}
}

// command is the path of one of the commands.
func (s *site) command(name string) string { return filepath.Join(s.commands, name) }

// running is a command that was started. It and its descendants are a process
// group, which is killed when the test ends.
type running struct {
	t       testing.TB
	cmd     *testutil.Cmd
	ended   chan struct{}
	readers sync.WaitGroup
}

// options say how a command is started.
type options struct {
	env    []string // added to the test's own
	dir    string
	user   *syscall.Credential
	files  []*os.File
	stdout func(line string) // default: to the test's log
	stderr func(line string) // the same
}

func (s *site) start(o options, name string, args ...string) *running {
	t := s.t
	t.Helper()
	r := &running{t: t, cmd: s.ns.Command(name, args...), ended: make(chan struct{})}
	r.cmd.Env = append(os.Environ(), o.env...)
	r.cmd.Dir = o.dir
	r.cmd.ExtraFiles = o.files
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: o.user}

	label := filepath.Base(name)
	logged := func(line string) { t.Logf("%s: %s", label, line) }
	if o.stdout == nil {
		o.stdout = logged
	}
	if o.stderr == nil {
		o.stderr = logged
	}
	// Descendants may hold these pipes for longer than the command lives.
	var theirs, ours []*os.File
	for i, each := range []func(string){o.stdout, o.stderr} {
		read, write, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		theirs, ours = append(theirs, write), append(ours, read)
		if i == 0 {
			r.cmd.Stdout = write
		} else {
			r.cmd.Stderr = write
		}
		r.readers.Go(func() {
			for lines := bufio.NewReader(read); ; {
				line, err := lines.ReadString('\n')
				if line != "" {
					each(line)
				}
				if err != nil {
					return
				}
			}
		})
	}
	err := r.cmd.Start()
	for _, f := range theirs {
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatalf("start %s: %v", label, err)
	}
	go func() {
		defer close(r.ended)
		_ = r.cmd.Wait() // the result is in ProcessState
	}()
	t.Cleanup(func() {
		group := -r.cmd.Process.Pid
		_ = syscall.Kill(group, syscall.SIGKILL) // it may be gone
		<-r.ended
		r.readers.Wait()
		// What is left may still write to a folder that is about to be removed.
		for end := time.Now().Add(5 * time.Second); syscall.Kill(group, 0) == nil && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		for _, f := range ours {
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return r
}

// alive says whether the command still runs.
func (r *running) alive() bool {
	select {
	case <-r.ended:
		return false
	default:
		return true
	}
}

// exit waits for the end of the command and returns its exit code.
func (r *running) exit() int {
	r.t.Helper()
	select {
	case <-r.ended:
	case <-time.After(patience):
		r.t.Fatalf("%s does not end", r.cmd.Path)
	}
	return r.cmd.ProcessState.ExitCode()
}

// flush waits for what the command, which has ended and left no descendants,
// had to say.
func (r *running) flush() { r.readers.Wait() }

// server is quicdemo serve and its successors.
type server struct {
	*running
	ns    *testutil.Netns
	lines chan quicdemo.Ready
	now   quicdemo.Ready // the generation that new connections go to
}

// serve starts a server and waits until it is ready.
func (s *site) serve(user *syscall.Credential, args ...string) *server {
	s.t.Helper()
	p := &server{ns: s.ns, lines: make(chan quicdemo.Ready, 16)}
	args = append([]string{"serve", "--json", "--addr", address, "--root", s.root, "--probation", "200ms"}, args...)
	p.running = s.start(options{
		dir:  "/",
		user: user,
		stdout: func(line string) {
			var ready quicdemo.Ready
			if err := json.Unmarshal([]byte(line), &ready); err != nil {
				s.t.Errorf("the server writes %q", line)
			}
			p.lines <- ready
		},
	}, s.command("quicdemo"), args...)
	p.next()
	return p
}

// next waits for the next generation to be ready.
func (p *server) next() {
	p.t.Helper()
	select {
	case p.now = <-p.lines:
	case <-time.After(patience):
		p.t.Fatal("no generation is ready")
	}
}

// upgrade has the active generation replace itself.
func (p *server) upgrade() {
	p.t.Helper()
	before := p.now
	testutil.WaitFor(p.t, patience, func() bool {
		var status handover.Status
		var err error
		p.ns.Run(func() { status, err = handover.RequestStatus(p.t.Context(), "@quicdemo-"+address) })
		return err == nil && status.PID == before.PID && !status.Probation
	}, "the end of the probation")
	if err := syscall.Kill(before.PID, syscall.SIGHUP); err != nil {
		p.t.Fatal(err)
	}
	p.next()
	if p.now.Generation <= before.Generation || p.now.PID == before.PID {
		p.t.Fatalf("generation %d, process %d follows on %d, %d", p.now.Generation, p.now.PID, before.Generation, before.PID)
	}
}

// snapshot reads the group.
func (s *site) snapshot() dispatch.Snapshot {
	s.t.Helper()
	list, err := dispatch.List(s.root)
	if err != nil || len(list) != 1 || list[0].Err != nil {
		s.t.Fatalf("groups: %+v, %v", list, err)
	}
	return *list[0].Snapshot
}

// received is the number of packets that a generation got.
func (s *site) received(generation uint32) uint64 {
	s.t.Helper()
	for _, g := range s.snapshot().Generations {
		if g.Number == generation {
			return g.Packets
		}
	}
	return 0
}
