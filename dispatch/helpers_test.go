// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/rawconn"
	"instar/internal/testutil"
)

// patience is how long a test waits for what should take microseconds.
const patience = 10 * time.Second

// sentinels are the errors that callers tell apart, with the names under which
// processes of a test report them.
var sentinels = map[string]error{
	"closed": dispatch.ErrClosed, "not-exist": dispatch.ErrNotExist, "reinstated": dispatch.ErrReinstated,
	"layout": dispatch.ErrLayout, "not-supported": dispatch.ErrNotSupported, "permission": dispatch.ErrPermission,
	"service": dispatch.ErrService, "mismatch": dispatch.ErrMismatch, "occupied": dispatch.ErrOccupied,
	"state": dispatch.ErrState, "conflict": dispatch.ErrConflict, "busy": dispatch.ErrBusy, "options": dispatch.ErrOptions, "no-bpffs": dispatch.ErrNoBPFFS, "unread": dispatch.ErrUnread,
}

// kinds names the sentinels that an error wraps.
func kinds(err error) []string {
	var is []string
	for name, sentinel := range sentinels {
		if errors.Is(err, sentinel) {
			is = append(is, name)
		}
	}
	var full *dispatch.FullError
	if errors.As(err, &full) {
		is = append(is, "full")
	}
	slices.Sort(is)
	return is
}

// wantRefused checks that an error is of exactly one kind and that its message
// has all of the words: the reason and the cure.
func wantRefused(t testing.TB, what string, err error, kind string, words ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: not refused, want %s", what, kind)
		return
	}
	wantRefusal(t, what, describe(err), kind, words...)
}

// describe is an error as processes of a test report it.
func describe(err error) string {
	if err == nil {
		return "ok"
	}
	return fmt.Sprintf("refused %s: %s", strings.Join(kinds(err), "+"), strings.ReplaceAll(err.Error(), "\n", " "))
}

// wantRefusal is wantRefused for what describe made of the error.
func wantRefusal(t testing.TB, what, refusal, kind string, words ...string) {
	t.Helper()
	if !strings.HasPrefix(refusal, "refused "+kind+": ") {
		t.Errorf("%s: %s\nwant it refused as %q", what, refusal, kind)
	}
	for _, word := range words {
		if !strings.Contains(refusal, word) {
			t.Errorf("%s: %s\nwant it to say %q", what, refusal, word)
		}
	}
}

// must ends the test when err is not nil.
func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// leave closes a group before the test ends.
func (w *world) leave(g *dispatch.Group) {
	w.Helper()
	w.must(g.Close())
}

// counts is how often each verdict was given.
type counts map[string]uint64

func (w *world) counts(g *dispatch.Group) counts {
	w.Helper()
	s := w.snapshot(g)
	var sum uint64
	for _, n := range s.Verdicts {
		sum += n
	}
	if sum != s.Packets {
		w.Errorf("verdicts add up to %d, and Packets is %d", sum, s.Packets)
	}
	return s.Verdicts
}

// wantCounts compares all counters with those of before, and waits a moment for
// packets that are on their way. Verdicts that are not in want have to be as
// before.
func (w *world) wantCounts(g *dispatch.Group, what string, before, want counts) {
	w.Helper()
	got := counts{}
	enough := func() bool {
		got = counts{}
		for v, n := range w.counts(g) {
			if n != before[v] {
				got[v] = n - before[v]
			}
		}
		return sum(got) >= sum(want)
	}
	deadline := time.Now().Add(patience)
	for !enough() && time.Now().Before(deadline) {
		time.Sleep(100 * time.Microsecond)
	}
	wanted := maps.Clone(want)
	maps.DeleteFunc(wanted, func(_ string, n uint64) bool { return n == 0 })
	if !maps.Equal(got, wanted) {
		w.Errorf("%s: counted %v, want %v", what, got, wanted)
	}
}

func sum(c counts) (n uint64) {
	for _, m := range c {
		n += m
	}
	return n
}

// plainSocket binds a UDP socket that is not Instar's. The network is as in
// dispatch.Options.
func plainSocket(network, address, device string, reuseport bool) (*net.UDPConn, error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return rawconn.Control(c, func(fd int) (err error) {
			if reuseport {
				err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			}
			if device != "" {
				err = errors.Join(err, unix.BindToDevice(fd, device))
			}
			return err
		})
	}}
	c, err := config.ListenPacket(context.Background(), network, address)
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

// plainListener is the like for TCP, with SO_REUSEPORT.
func plainListener(network, address, device string) (*net.TCPListener, error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return rawconn.Control(c, func(fd int) error {
			err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			if device != "" {
				err = errors.Join(err, unix.BindToDevice(fd, device))
			}
			return err
		})
	}}
	config.SetMultipathTCP(false)
	l, err := config.Listen(context.Background(), network, address)
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

func (w *world) plainSocket(network, address, device string, reuseport bool) *net.UDPConn {
	w.Helper()
	c, err := plainSocket(network, address, device, reuseport)
	w.must(err)
	w.Cleanup(func() { _ = c.Close() })
	return c
}

// rival is a process with a plain socket: Args are network, address and
// "reuseport" or "", and "hide" or nothing.
var rival = testutil.NewProgram("rival", func(c *testutil.Conversation) error {
	s, err := plainSocket(c.Args[0], c.Args[1], "", c.Args[2] == "reuseport")
	if err != nil {
		return err
	}
	if slices.Contains(c.Args, "hide") {
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
			return err
		}
	}
	c.Send("bound")
	c.Recv()
	return s.Close()
})

// encode and decode carry options to a process.
func encode(o dispatch.Options) string {
	o.Logger = nil
	b, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func decode(s string) (o dispatch.Options, err error) {
	err = json.Unmarshal([]byte(s), &o)
	return o, err
}

// server is a process of a service. Args are its options. It answers each line:
//
//	open, prepare UID             Open, Prepare
//	path FOLDER                   OpenPath
//	join N, quiet N               Join, and serve the sockets or not
//	activate [N], rollback        the generation or another one, Group.Rollback
//	evict N, repair, upgrade      Group.Evict, Group.Repair, Group.UpgradeProgram
//	forget FOLDER, list           Forget, List
//	state, superseded             State; waits for Superseded
//	wait STATE                    Wait
//	drain JSON                    Drain, with the options, Done closed when they are {}
//	secret LABEL                  Group.Secret, 16 bytes
//	snapshot                      Group.Snapshot
//	close, leave                  Generation.Close, Group.Close
//	hide                          keeps others of its user from looking into it
//	hold N                        stops for ever after N more steps, says "held STEP"
//	steps                         how many steps there were since hold or steps
var server = testutil.NewProgram("server", runServer)

func runServer(c *testutil.Conversation) error {
	o, err := decode(c.Args[0])
	if err != nil {
		return err
	}
	s := &serverProcess{options: o, talk: c}
	for {
		line, ok := c.Recv()
		if !ok {
			return nil
		}
		verb, arg, _ := strings.Cut(line, " ")
		answer, err := s.do(verb, arg)
		switch {
		case err != nil:
			c.Send("%s", describe(err))
		case answer != "":
			c.Send("%s", answer)
		default:
			c.Send("ok")
		}
	}
}

type serverProcess struct {
	options dispatch.Options
	talk    *testutil.Conversation
	group   *dispatch.Group
	gen     *dispatch.Generation
	service *service
	steps   []string
}

func (s *serverProcess) do(verb, arg string) (answer string, err error) {
	number, _ := strconv.Atoi(arg)
	ctx, cancel := contextWithPatience()
	defer cancel()
	switch verb {
	case "open":
		s.group, err = dispatch.Open(s.options)
	case "prepare":
		_, err = dispatch.Prepare(s.options, dispatch.Owner{UID: number, GID: number})
	case "path":
		s.group, err = dispatch.OpenPath(arg)
	case "join", "quiet":
		if s.gen, err = s.group.Join(number); err != nil {
			return "", err
		}
		if verb == "join" {
			s.service = serve(s.gen)
		}
		return strconv.Itoa(int(s.gen.Number())), nil
	case "activate":
		if arg != "" {
			return "", s.group.Activate(uint32(number))
		}
		err = s.gen.Activate()
	case "rollback":
		n, err := s.group.Rollback()
		return strconv.Itoa(int(n)), err
	case "evict":
		err = s.group.Evict(uint32(number))
	case "repair":
		err = s.group.Repair()
	case "upgrade":
		upgraded, err := s.group.UpgradeProgram()
		return strconv.FormatBool(upgraded), err
	case "forget":
		err = dispatch.Forget(arg)
	case "list":
		entries, err := dispatch.List(s.options.Root)
		lines := make([]string, len(entries))
		for i, e := range entries {
			lines[i] = e.Path + " " + describe(e.Err)
		}
		return strings.Join(lines, " | "), err
	case "state":
		answer = s.gen.State().String()
	case "superseded":
		select {
		case <-s.gen.Superseded():
		case <-ctx.Done():
			err = ctx.Err()
		}
	case "wait":
		states := map[string]dispatch.State{}
		for _, state := range []dispatch.State{dispatch.StateGone, dispatch.StateStaged, dispatch.StateActive, dispatch.StateDraining} {
			states[state.String()] = state
		}
		_, err = s.gen.Wait(ctx, states[arg])
	case "drain":
		o := dispatch.DrainOptions{}
		if arg == "" {
			done := make(chan struct{})
			close(done)
			o.Done = done
		} else if err := json.Unmarshal([]byte(arg), &o); err != nil {
			return "", err
		}
		r, err := s.gen.Drain(ctx, o)
		return r.Reason, err
	case "secret":
		b, err := s.group.Secret(arg, 16)
		return fmt.Sprintf("%x", b), err
	case "snapshot":
		snapshot, err := s.group.Snapshot()
		if err != nil {
			return "", err
		}
		b, err := json.Marshal(snapshot)
		return string(b), err
	case "close":
		err = s.gen.Close()
		if s.service != nil {
			s.service.wait()
		}
	case "leave":
		err = s.group.Close()
	case "hide":
		err = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	case "hold":
		s.steps = nil
		dispatch.HoldAtSteps(func(done string) {
			if len(s.steps) == number {
				s.talk.Send("held %s", done)
				select {}
			}
			s.steps = append(s.steps, done)
		})
	case "steps":
		answer = strings.Join(s.steps, ",")
		s.steps = nil
	default:
		err = fmt.Errorf("no such command: %s", verb)
	}
	return answer, err
}

// start starts a server process in the world's namespace.
func (w *world) start(o dispatch.Options, as *testutil.Identity) *testutil.Process {
	w.Helper()
	return server.Start(w, testutil.Options{Args: []string{encode(o)}, NS: w.ns, As: as})
}

// ask sends a line to a server, which has to do it.
func (w *world) ask(p *testutil.Process, format string, args ...any) string {
	w.Helper()
	answer := p.Ask(format, args...)
	if strings.HasPrefix(answer, "refused ") {
		w.Fatalf("%s: %s: %s", p, fmt.Sprintf(format, args...), answer)
	}
	return answer
}

// nobody may enter what the test made for it.
func nobody(t testing.TB) *testutil.Identity {
	t.Helper()
	testutil.NeedRoot(t)
	return testutil.Nobody()
}

// list is the names in a folder.
func list(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

// farOff is later than the end of any test.
const farOff = time.Hour

// testTime is the longest that a test should take.
const testTime = 20 * time.Second

var farFuture = time.Now().Add(farOff)

// path is the folder that a group of this namespace gets.
func (w *world) path(o dispatch.Options) string {
	w.Helper()
	namespace, err := dispatch.Namespace()
	w.must(err)
	folder, err := dispatch.FolderName(o)
	w.must(err)
	return filepath.Join(o.Root, namespace, folder)
}

func checkOwner(t testing.TB, when, path string, uid uint32) {
	t.Helper()
	names := []string{"."}
	for _, name := range append(names, list(t, path)...) {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(path, name), &st); err != nil {
			t.Fatal(err)
		}
		if st.Uid != uid || st.Gid != uid || st.Mode&0o077 != 0 {
			t.Errorf("%s: %s has owner %d:%d and mode %o", when, name, st.Uid, st.Gid, st.Mode)
		}
	}
}

// runs counts how often the pinned program of a group runs while f does.
func runs(t testing.TB, path string, f func()) uint64 {
	t.Helper()
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		t.Fatal(err)
	}
	defer stats.Close()
	p, err := ebpf.LoadPinnedProgram(filepath.Join(path, "program"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	count := func() uint64 {
		s, err := p.Stats()
		if err != nil {
			t.Fatal(err)
		}
		return s.RunCount
	}
	before := count()
	f()
	return count() - before
}
