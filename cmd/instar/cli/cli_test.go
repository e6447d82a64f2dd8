// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/testutil"
)

// TestMain makes the test binary the command itself when it runs under the
// command's name, so that scripts and the demo start the real thing.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "instar":
		os.Exit(Main(System()))
	case "asnobody":
		os.Exit(asNobody(os.Args[1:]))
	case "upgradable":
		os.Exit(upgradable(os.Args[1]))
	}
	testutil.Main(m)
}

// asNobody becomes the user nobody without any capability and runs a command.
func asNobody(args []string) int {
	path, err := exec.LookPath(args[0])
	if err == nil {
		err = errors.Join(unix.Setgroups(nil), unix.Setresgid(65534, 65534, 65534), unix.Setresuid(65534, 65534, 65534))
	}
	if err == nil {
		err = unix.Exec(path, args, os.Environ())
	}
	fmt.Fprintln(os.Stderr, "asnobody:", err)
	return 99
}

// commands makes a folder with the commands that scripts run.
func commands(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	// t.TempDir makes the folder above for the test's user only.
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"instar", "asnobody", "upgradable"} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o755); err != nil { // #nosec: everybody has to run it
			t.Fatal(err)
		}
	}
	return dir
}

// script is what the commands of a script that uses groups share.
type script struct {
	ns          *testutil.Netns
	groups      map[string]*dispatch.Group
	generations map[string]*dispatch.Generation
}

type scriptKey struct{}

func (s *script) close() error {
	var err error
	for _, g := range s.generations {
		err = errors.Join(err, g.Close())
	}
	for _, g := range s.groups {
		err = errors.Join(err, g.Close())
	}
	return err
}

// TestScripts runs testdata/script: those that need no group.
func TestScripts(t *testing.T) {
	bin, races := commands(t), testutil.WithoutQuicGoRaces(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			env.Setenv("WITHOUT_QUIC_GO_RACES", races)
			env.Setenv("PATH", bin+":"+env.Getenv("PATH"))
			env.Setenv("TMPDIR", os.TempDir())
			return nil
		},
		Condition: condition,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code": code(func(ts *testscript.TestScript, args []string) int {
				err := ts.Exec(args[0], args[1:]...)
				var exit *exec.ExitError
				if err != nil && !errors.As(err, &exit) {
					ts.Fatalf("%v", err)
				}
				if exit != nil {
					return exit.ExitCode()
				}
				return 0
			}),
			"json":       checkJSON,
			"retry":      retry,
			"stopserver": stopServer,
			"get":        get,
			"listen":     listen,
			"sigterm":    sigterm,
			"schema":     validate,
		},
	})
}

// TestGroupScripts runs testdata/group: those with groups, each script in a
// network namespace and with a bpffs of its own. There the command instar runs
// in this process.
func TestGroupScripts(t *testing.T) {
	testutil.NeedRoot(t)
	instar := func(ts *testscript.TestScript, args []string) int {
		var code int
		var stdout bytes.Buffer
		ts.Value(scriptKey{}).(*script).ns.Run(func() {
			code = Main(Env{Args: args[1:], Stdout: &stdout, Stderr: ts.Stderr(), Root: ts.Getenv("ROOT")})
		})
		ts.Check(checkSchema(args, stdout.String()))
		_, err := stdout.WriteTo(ts.Stdout())
		ts.Check(err)
		return code
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/group",
		Setup: func(env *testscript.Env) error {
			tb := env.T().(testing.TB)
			s := &script{ns: testutil.OtherNetNS(tb), groups: map[string]*dispatch.Group{}, generations: map[string]*dispatch.Generation{}}
			env.Setenv("ROOT", filepath.Join(testutil.BPFFS(tb), "instar"))
			env.Values[scriptKey{}] = s
			env.Values[testKey{}] = tb
			env.Defer(func() {
				if err := s.close(); err != nil {
					tb.Error(err)
				}
			})
			return nil
		},
		Condition: condition,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"instar": func(ts *testscript.TestScript, neg bool, args []string) {
				if got := instar(ts, append([]string{"instar"}, args...)); (got != 0) != neg {
					ts.Fatalf("exit code %d", got)
				}
			},
			"code":    code(instar),
			"json":    checkJSON,
			"open":    openGroup,
			"opentcp": openTCP,
			"join":    join,
			"leave":   leave,
			"packets": sendPackets,
			"otherns": otherNamespace,
			"traced":  traced(instar),
		},
	})
}

func condition(name string) (bool, error) {
	if name == "root" {
		return os.Geteuid() == 0, nil
	}
	return false, fmt.Errorf("unknown condition %q", name)
}

// code is the script command "code N COMMAND...": it has to exit with N, and to
// say why on one line when N is not 0.
func code(run func(*testscript.TestScript, []string) int) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		want, err := strconv.Atoi(args[0])
		if err != nil || neg {
			ts.Fatalf("usage: code N COMMAND...")
		}
		if got := run(ts, args[1:]); got != want {
			ts.Fatalf("exit code %d, want %d", got, want)
		}
	}
}

// checkJSON is "json FILE PATH [VALUE]": the file is one JSON document in which
// the path of names and indices exists (and holds the value).
func checkJSON(ts *testscript.TestScript, neg bool, args []string) {
	var v any
	dec := json.NewDecoder(strings.NewReader(ts.ReadFile(args[0])))
	ts.Check(dec.Decode(&v))
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		ts.Fatalf("more than one JSON document")
	}
	for name := range strings.SplitSeq(args[1], ".") {
		var next any
		ok := false
		switch at := v.(type) {
		case map[string]any:
			next, ok = at[name]
		case []any:
			i, err := strconv.Atoi(name)
			if ok = err == nil && i < len(at); ok {
				next = at[i]
			}
		}
		if !ok {
			if neg {
				return
			}
			ts.Fatalf("%s: no %q", args[1], name)
		}
		v = next
	}
	if len(args) < 3 {
		if neg {
			ts.Fatalf("%s: is there", args[1])
		}
		return
	}
	if got := fmt.Sprint(v); (got == args[2]) == neg {
		ts.Fatalf("%s is %s", args[1], got)
	}
}

// openGroup is "open NAME ADDRESS [SERVICE [DEVICE]]", "! open" with steering flow.
func openGroup(ts *testscript.TestScript, flows bool, args []string) {
	s := ts.Value(scriptKey{}).(*script)
	o := dispatch.Options{Address: args[1], Service: "test", Build: "b1", Root: ts.Getenv("ROOT"), MaxGenerations: 4, Workers: 4, FlowEntries: 64}
	if len(args) > 2 {
		o.Service = args[2]
	}
	if len(args) > 3 {
		o.Device = args[3]
	}
	if flows {
		o.Steering = dispatch.SteeringFlow
	}
	s.ns.Run(func() {
		g, err := dispatch.Open(o)
		ts.Check(err)
		s.groups[args[0]] = g
		ts.Setenv(args[0], g.Path())
	})
}

// openTCP is "opentcp NAME ADDRESS".
func openTCP(ts *testscript.TestScript, _ bool, args []string) {
	s := ts.Value(scriptKey{}).(*script)
	s.ns.Run(func() {
		g, err := dispatch.Open(dispatch.Options{Network: "tcp", Address: args[1], Service: "test", Root: ts.Getenv("ROOT")})
		ts.Check(err)
		s.groups[args[0]] = g
		ts.Setenv(args[0], g.Path())
	})
}

// join is "join GROUP GENERATION [activate]".
func join(ts *testscript.TestScript, _ bool, args []string) {
	s := ts.Value(scriptKey{}).(*script)
	s.ns.Run(func() {
		g, err := s.groups[args[0]].Join(2)
		ts.Check(err)
		s.generations[args[1]] = g
		if len(args) > 2 {
			ts.Check(g.Activate())
		}
	})
}

// leave is "leave GENERATION".
func leave(ts *testscript.TestScript, _ bool, args []string) {
	s := ts.Value(scriptKey{}).(*script)
	ts.Check(s.generations[args[0]].Close())
	delete(s.generations, args[0])
}

// sendPackets is "packets GROUP N": it returns once all were counted.
func sendPackets(ts *testscript.TestScript, _ bool, args []string) {
	n, err := strconv.ParseUint(args[1], 10, 16)
	ts.Check(err)
	s := ts.Value(scriptKey{}).(*script)
	g := s.groups[args[0]]
	before, err := g.Snapshot()
	ts.Check(err)
	s.ns.Run(func() {
		c, err := net.Dial("udp", before.Address)
		ts.Check(err)
		for range n {
			_, err := c.Write([]byte("hello"))
			ts.Check(err)
		}
		ts.Check(c.Close())
	})
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		after, err := g.Snapshot()
		ts.Check(err)
		if after.Packets == before.Packets+n {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("%d packets after %d more than %d", after.Packets, n, before.Packets)
		}
	}
}

// traced is "traced GROUP N COMMAND...": it runs the command while packets come, N at a
// time, until it has ended.
func traced(run func(*testscript.TestScript, []string) int) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		s := ts.Value(scriptKey{}).(*script)
		snapshot, err := s.groups[args[0]].Snapshot()
		ts.Check(err)
		n, err := strconv.Atoi(args[1])
		ts.Check(err)
		over, sender := make(chan struct{}), make(chan error)
		go s.ns.Run(func() {
			for {
				c, err := net.Dial("udp", snapshot.Address)
				for i := 0; err == nil && i < n; i++ {
					_, err = c.Write([]byte("hello"))
				}
				if err == nil {
					err = c.Close()
				}
				select {
				case <-over:
					sender <- err
					return
				case <-time.After(20 * time.Millisecond):
				}
			}
		})
		code := run(ts, args[2:])
		close(over)
		if err := <-sender; err != nil || (code != 0) != neg {
			ts.Fatalf("exit code %d (%v)", code, err)
		}
	}
}

// otherNamespace is "otherns": what follows runs in another namespace.
func otherNamespace(ts *testscript.TestScript, _ bool, _ []string) {
	s := ts.Value(scriptKey{}).(*script)
	s.ns = testutil.OtherNetNS(ts.Value(testKey{}).(testing.TB))
}

type testKey struct{}

func TestExitCode(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, 0},
		{errors.New("any"), 1},
		{usagef("x"), 2},
		{fmt.Errorf("open: %w", fs.ErrPermission), 3},
		{fmt.Errorf("open: %w", unix.EPERM), 3},
		{fmt.Errorf("open: %w", dispatch.ErrNotSupported), 3},
		{fmt.Errorf("open: %w", dispatch.ErrPermission), 3},
		{fmt.Errorf("open: %w", dispatch.ErrOptions), 2},
		{fmt.Errorf("open: %w: %w", dispatch.ErrOccupied, unix.EACCES), 5},
		{fmt.Errorf("open: %w", dispatch.ErrService), 5},
		{fmt.Errorf("open: %w", dispatch.ErrMismatch), 5},
		{fmt.Errorf("activate: %w", dispatch.ErrState), 5},
		{fmt.Errorf("activate: %w", dispatch.ErrBusy), 5},
		{fmt.Errorf("open: %w", dispatch.ErrNotExist), 4},
		{fmt.Errorf("open: %w", fs.ErrNotExist), 4},
		{fmt.Errorf("join: %w", &dispatch.FullError{}), 5},
		{fmt.Errorf("open: %w", dispatch.ErrLayout), 5},
		{refusedf("x"), 5},
		{errors.Join(fmt.Errorf("wait: %w", errInterrupted), errors.New("close")), 130},
	} {
		if got := exitCode(c.err); got != c.want {
			t.Errorf("exitCode(%v) = %d, want %d", c.err, got, c.want)
		}
	}
}

func TestOneLine(t *testing.T) {
	err := errors.Join(errors.New("first"), errors.New("second\n  third\n"))
	if got, want := oneLine(err), "first; second; third"; got != want {
		t.Errorf("oneLine = %q, want %q", got, want)
	}
}

func TestSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second:                          "0s",
		1234 * time.Microsecond:               "1ms",
		1234 * time.Millisecond:               "1.2s",
		65*time.Second + 400*time.Millisecond: "1m5s",
		3*time.Hour + 25*time.Minute + 1:      "3h25m",
		50*time.Hour + 25*time.Minute + 1:     "2d2h",
		59*time.Second + 999*time.Millisecond: "1m0s",
	} {
		if got := span(d); got != want {
			t.Errorf("span(%d) = %q, want %q", d, got, want)
		}
	}
}

func TestAddressMatch(t *testing.T) {
	entry := func(network, address, device string) dispatch.Entry {
		return dispatch.Entry{Snapshot: &dispatch.Snapshot{Network: network, Address: address, Device: device}}
	}
	v4, v6 := entry("udp4", "127.0.0.1:443", ""), entry("udp6", "[::1]:443", "")
	wild, bound := entry("udp", "[::]:443", ""), entry("udp4", "127.0.0.1:443", "eth0")
	for _, c := range []struct {
		name  string
		entry dispatch.Entry
		want  bool
	}{
		{"127.0.0.1:443", v4, true},
		{"udp 127.0.0.1:443", v4, true},
		{"udp4 127.0.0.1:443", v4, true},
		{"udp6 127.0.0.1:443", v4, false},
		{"127.0.0.1:444", v4, false},
		{"[::1]:443", v6, true},
		{"[0:0::1]:443", v6, true},
		{":443", wild, true},
		{":443", v4, false},
		{"[::]:443", wild, true},
		{"127.0.0.1:443", bound, true},
		{"127.0.0.1:443 eth0", bound, true},
		{"udp 127.0.0.1:443 eth0", bound, true},
		{"127.0.0.1:443 eth0", v4, false},
		{"127.0.0.1:443", dispatch.Entry{}, false},
		{"", v4, false},
		{"udp", v4, false},
		{"localhost:443", v4, false},
		{"udp 127.0.0.1:443 eth0 x", bound, false},
	} {
		if got := addressMatch(c.name)(c.entry); got != c.want {
			t.Errorf("addressMatch(%q)(%+v) = %v", c.name, c.entry.Snapshot, got)
		}
	}
}

func TestLookupOwner(t *testing.T) {
	for _, c := range []struct {
		in       string
		uid, gid int
		code     int
	}{
		{"root", 0, 0, 0},
		{"0", 0, 0, 0},
		{"root:0", 0, 0, 0},
		{"0:17", 0, 17, 0},
		{"root:root", 0, 0, 0},
		{"4711:17", 4711, 17, 0},
		{"4711", 0, 0, 2},
		{"no-such-user", 0, 0, 2},
		{"root:no-such-group", 0, 0, 2},
		{"-1", 0, 0, 2},
	} {
		got, err := lookupOwner("--owner", c.in)
		if exitCode(err) != c.code {
			t.Errorf("lookupOwner(%q): %v", c.in, err)
		}
		if err == nil && got != (dispatch.Owner{UID: c.uid, GID: c.gid}) {
			t.Errorf("lookupOwner(%q) = %+v", c.in, got)
		}
	}
}

// TestColours checks that a table is coloured on a terminal only, and that
// colours do not move columns.
func TestColours(t *testing.T) {
	var tab table
	tab.add(colourFaint, "A", "B")
	tab.add(colourGreen, "long cell", "1")
	var plain, coloured bytes.Buffer
	if err := errors.Join(tab.write(&plain, false), tab.write(&coloured, true)); err != nil {
		t.Fatal(err)
	}
	stripped := strings.NewReplacer(colourFaint, "", colourGreen, "", colourReset, "").Replace(coloured.String())
	if stripped != plain.String() || stripped == coloured.String() {
		t.Errorf("plain:\n%s\ncoloured:\n%q", plain.String(), coloured.String())
	}
	terminal := Env{Terminal: func(io.Writer) bool { return true }}
	terminal.setDefaults()
	if !terminal.colours(nil) {
		t.Error("no colours on a terminal")
	}
	terminal.Getenv = func(name string) string { return map[string]string{"NO_COLOR": "1"}[name] }
	if terminal.colours(nil) {
		t.Error("NO_COLOR is ignored")
	}
}

// TestDrainWait checks that "drain --wait" returns when the generation is gone,
// and when it is interrupted.
func TestDrainWait(t *testing.T) {
	ns, root := testutil.NetNS(t), testutil.BPFFS(t)
	g, err := dispatch.Open(dispatch.Options{Address: "127.0.0.1:443", Service: "test", Root: root, FlowEntries: 64})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	var generations [2]*dispatch.Generation
	for i := range generations {
		if generations[i], err = g.Join(1); err != nil {
			t.Fatal(err)
		}
		defer generations[i].Close()
		if err := generations[i].Activate(); err != nil {
			t.Fatal(err)
		}
	}

	drain := func(ctx context.Context) <-chan string {
		result := make(chan string, 1)
		go ns.Run(func() {
			var out bytes.Buffer
			code := Main(Env{Context: ctx, Args: []string{"drain", "127.0.0.1:443", "1", "--wait"}, Stdout: &out, Stderr: &out, Root: root})
			result <- fmt.Sprintf("%d %s", code, out.String())
		})
		return result
	}
	ctx, cancel := context.WithCancel(t.Context())
	result := drain(ctx)
	cancel()
	if got := <-result; !strings.HasPrefix(got, "130 ") || !strings.HasSuffix(got, "interrupted\n") {
		t.Errorf("interrupted: %q", got)
	}
	result = drain(t.Context())
	if err := generations[0].Close(); err != nil {
		t.Fatal(err)
	}
	if got := <-result; !strings.HasPrefix(got, "0 ") || !strings.HasSuffix(got, "is gone\n") && !strings.Contains(got, "gone already") {
		t.Errorf("gone: %q", got)
	}
}

func TestBuildText(t *testing.T) {
	b := buildJSON{Release: "(devel)", Go: "go1.26.0", Platform: "linux/amd64"}
	for _, c := range []struct {
		revision string
		modified bool
		want     string
	}{
		{"", false, "instar (devel) go1.26.0 linux/amd64"},
		{"abc", false, "instar (devel) (abc) go1.26.0 linux/amd64"},
		{"0123456789abcdef", true, "instar (devel) (0123456789ab, modified) go1.26.0 linux/amd64"},
	} {
		b.Revision, b.Modified = c.revision, c.modified
		if got := b.text(); got != c.want {
			t.Errorf("text = %q, want %q", got, c.want)
		}
	}
}

// TestFlagHelp checks that the help of a flag names its placeholder in a
// sentence: pflag shows it in front as well.
func TestFlagHelp(t *testing.T) {
	a := &app{}
	placeholder := regexp.MustCompile(`--\S+ (\S+) {2,}(.*)`)
	seen := 0
	var check func(*cobra.Command)
	check = func(cmd *cobra.Command) {
		for _, flag := range placeholder.FindAllStringSubmatch(cmd.LocalFlags().FlagUsages(), -1) {
			seen++
			if strings.Contains(flag[2], "("+flag[1]+")") {
				t.Errorf("%s: %s", cmd.CommandPath(), flag[0])
			}
		}
		for _, sub := range cmd.Commands() {
			check(sub)
		}
	}
	if check(a.command()); seen < 10 {
		t.Errorf("%d flags with a placeholder", seen)
	}
}
