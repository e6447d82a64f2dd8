// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// The test binary is an activator when stageEnv is "activate": it sets LISTEN_PID
// to its own process and executes itself as the service, as the manager does
// between fork and exec. pidEnv and idEnv have it lie.
const (
	stageEnv = "INSTAR_TEST_ACTIVATION"
	pidEnv   = "INSTAR_TEST_ACTIVATION_PID"
	idEnv    = "INSTAR_TEST_ACTIVATION_ID"
	filesEnv = "INSTAR_TEST_ACTIVATION_FILES" // how many the service inherits
)

// report is what the service says of itself.
type report struct {
	Err         string
	Env         []string // variables that are still set
	Descriptors []reportedFD
	Again       int   // descriptors of a second call
	Leaks       []int // descriptors that a child would have
}

type reportedFD struct {
	Name                 string
	Type                 int // of the socket, -1 if it is none
	Cloexec, NonBlocking bool
}

func runStage(stage string) int {
	err := fmt.Errorf("no stage %q", stage)
	switch stage {
	case "activate":
		err = activate()
	case "serve":
		err = serve()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func activate() error {
	files, err := strconv.Atoi(os.Getenv(filesEnv))
	if err != nil {
		return err
	}
	// What the test itself inherited ends here.
	if err := unix.CloseRange(uint(firstFD+files), math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return err
	}
	pid := os.Getenv(pidEnv)
	if pid == "" {
		pid = strconv.Itoa(os.Getpid())
	}
	id := os.Getenv(idEnv)
	if id == "own" {
		own, known := pidfdID()
		if !known {
			return errors.New("the kernel has no pidfs")
		}
		id = strconv.FormatUint(own, 10)
	}
	env := append(os.Environ(), stageEnv+"=serve", listenPID+"="+pid)
	if id != "" {
		env = append(env, listenPIDFDID+"="+id)
	}
	return syscall.Exec("/proc/self/exe", os.Args, lastWins(env))
}

func lastWins(env []string) []string {
	last := map[string]string{}
	for _, assignment := range env {
		name, _, _ := strings.Cut(assignment, "=")
		last[name] = assignment
	}
	var list []string
	for _, assignment := range last {
		list = append(list, assignment)
	}
	return list
}

// serve takes what was inherited, reports it, and answers one client at each
// socket with the socket's name.
func serve() error {
	inherited, err := Inherited(os.Getenv, os.Unsetenv)
	var r report
	if err != nil {
		r.Err = err.Error()
	}
	for _, assignment := range os.Environ() {
		if strings.HasPrefix(assignment, "LISTEN_") {
			r.Env = append(r.Env, assignment)
		}
	}
	for _, d := range inherited {
		f := reportedFD{Name: d.Name}
		err := rawconn.Of(d.File, func(fd int) error {
			descriptor, err1 := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
			file, err2 := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
			f.Cloexec, f.NonBlocking = descriptor&unix.FD_CLOEXEC != 0, file&unix.O_NONBLOCK != 0
			var err3 error
			if f.Type, err3 = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); errors.Is(err3, unix.ENOTSOCK) {
				f.Type, err3 = -1, nil
			}
			return errors.Join(err1, err2, err3)
		})
		if err != nil {
			return err
		}
		r.Descriptors = append(r.Descriptors, f)
	}
	for fd := firstFD; fd < firstFD+10; fd++ {
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			r.Leaks = append(r.Leaks, fd)
		}
	}
	again, err := Inherited(os.Getenv, os.Unsetenv)
	if err != nil {
		return err
	}
	r.Again = len(again)
	if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
		return err
	}
	for i, d := range inherited {
		if err := answer(d, r.Descriptors[i].Type); err != nil {
			return fmt.Errorf("%s: %w", d.Name, err)
		}
	}
	return nil
}

func answer(d Descriptor, socketType int) error {
	switch socketType {
	case unix.SOCK_STREAM, unix.SOCK_SEQPACKET:
		l, err := net.FileListener(d.File)
		if err != nil {
			return err
		}
		c, err := l.Accept()
		if err != nil {
			return err
		}
		_, err = io.WriteString(c, d.Name)
		return errors.Join(err, c.Close(), l.Close(), d.File.Close())
	case unix.SOCK_DGRAM:
		c, err := net.FilePacketConn(d.File)
		if err != nil {
			return err
		}
		_, from, err := c.ReadFrom(make([]byte, 1))
		if err != nil {
			return err
		}
		_, err = c.WriteTo([]byte(d.Name), from)
		return errors.Join(err, c.Close(), d.File.Close())
	}
	return d.File.Close()
}

// service starts one, by way of the activator, that inherits the files.
func service(t *testing.T, files []*os.File, env ...string) report {
	t.Helper()
	out, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout) // t's ends before the cleanup
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env = append(os.Environ(), "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0", stageEnv+"=activate", fmt.Sprintf("%s=%d", filesEnv, len(files)))
	cmd.Env = append(cmd.Env, env...)
	cmd.ExtraFiles, cmd.Stdout = files, w
	var said strings.Builder
	cmd.Stderr = &said
	err = cmd.Start()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			cancel()
		}
		defer cancel()
		if err := errors.Join(cmd.Wait(), out.Close()); err != nil {
			t.Errorf("the service: %v; it says: %s", err, said.String())
		}
	})
	var r report
	if err := json.NewDecoder(out).Decode(&r); err != nil {
		t.Fatalf("the service's report: %v", err)
	}
	if len(r.Env) > 0 || r.Again != 0 {
		t.Errorf("the service still has %q, and inherited %d descriptors once more", r.Env, r.Again)
	}
	return r
}

// bound returns a socket that is bound, and listens if it has connections.
// It is blocking, as the manager's are.
func bound(t *testing.T, domain, socketType int, address unix.Sockaddr) *os.File {
	t.Helper()
	fd, err := unix.Socket(domain, socketType|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "socket")
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Bind(fd, address); err != nil {
		t.Fatal(err)
	}
	if socketType != unix.SOCK_DGRAM {
		if err := unix.Listen(fd, 5); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// ask sends one octet to the socket and returns the answer.
func ask(t *testing.T, network string, f *os.File) string {
	t.Helper()
	var addr string
	err := rawconn.Of(f, func(fd int) error {
		sa, err := unix.Getsockname(fd)
		switch sa := sa.(type) {
		case *unix.SockaddrInet4:
			addr = fmt.Sprintf("127.0.0.1:%d", sa.Port)
		case *unix.SockaddrUnix:
			addr = sa.Name
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var d net.Dialer
	if network == "unixgram" { // an answer needs an address
		d.LocalAddr = &net.UnixAddr{Name: addr + ".client", Net: network}
	}
	c, err := d.DialContext(t.Context(), network, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(testTimeout)); err != nil {
		t.Fatal(err)
	}
	if strings.HasPrefix(network, "udp") || network == "unixgram" {
		if _, err := c.Write([]byte{0}); err != nil {
			t.Fatal(err)
		}
	}
	buf := make([]byte, 100)
	n, err := c.Read(buf)
	if err != nil {
		t.Fatalf("the answer of %s: %v", network, err)
	}
	return string(buf[:n])
}

func TestActivation(t *testing.T) {
	dir := filepath.Dir(newManager(t).socket) // a short path
	loopback := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	path := func(name string) unix.Sockaddr { return &unix.SockaddrUnix{Name: filepath.Join(dir, name)} }
	sockets := []struct {
		name, network string
		socketType    int
		file          *os.File
	}{
		{"quic", "udp4", unix.SOCK_DGRAM, bound(t, unix.AF_INET, unix.SOCK_DGRAM, loopback)},
		{"web", "tcp4", unix.SOCK_STREAM, bound(t, unix.AF_INET, unix.SOCK_STREAM, loopback)},
		{"web", "unix", unix.SOCK_STREAM, bound(t, unix.AF_UNIX, unix.SOCK_STREAM, path("s"))},
		{"unknown", "unixgram", unix.SOCK_DGRAM, bound(t, unix.AF_UNIX, unix.SOCK_DGRAM, path("d"))},
		{"seq", "unixpacket", unix.SOCK_SEQPACKET, bound(t, unix.AF_UNIX, unix.SOCK_SEQPACKET, path("p"))},
		{"instar/3/state", "", -1, open(t, os.DevNull)},
		{"a b%", "tcp4", unix.SOCK_STREAM, bound(t, unix.AF_INET, unix.SOCK_STREAM, loopback)},
	}
	// In another order as well: the names decide.
	for _, reversed := range []bool{false, true} {
		if reversed {
			slices.Reverse(sockets)
		}
		var files []*os.File
		var names []string
		var want []reportedFD
		for _, s := range sockets {
			files, names = append(files, s.file), append(names, s.name)
			want = append(want, reportedFD{s.name, s.socketType, true, s.socketType >= 0})
		}
		r := service(t, files, fmt.Sprintf("%s=%d", listenFDs, len(files)), listenNames+"="+strings.Join(names, ":"))
		if r.Err != "" || fmt.Sprint(r.Descriptors) != fmt.Sprint(want) {
			t.Fatalf("%v, %s\nwant %v", r.Descriptors, r.Err, want)
		}
		for _, s := range sockets {
			if s.network == "" {
				continue
			}
			if got := ask(t, s.network, s.file); got != s.name {
				t.Errorf("%s answers %q, want %q", s.network, got, s.name)
			}
		}
		if err := os.Remove(filepath.Join(dir, "d.client")); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNames(t *testing.T) {
	for _, tc := range []struct {
		files int
		names string // empty: not set
		want  []string
		err   string
	}{
		{0, "", nil, ""},
		{0, "x", nil, `LISTEN_FDNAMES="x": it names 1 descriptors, but LISTEN_FDS=0`},
		{1, "", []string{NameUnknown}, ""},
		{3, "", []string{NameUnknown, NameUnknown, NameUnknown}, ""},
		{2, "stored:stored", []string{NameStored, NameStored}, ""},
		{3, "::", []string{"", "", ""}, ""},
		{2, "a", nil, `LISTEN_FDNAMES="a": it names 1 descriptors, but LISTEN_FDS=2`},
		{1, "a:b", nil, "names 2 descriptors"},
	} {
		files := slices.Repeat([]*os.File{open(t, os.DevNull)}, tc.files)
		env := []string{fmt.Sprintf("%s=%d", listenFDs, tc.files)}
		if tc.names != "" {
			env = append(env, listenNames+"="+tc.names)
		}
		r := service(t, files, env...)
		var got []string
		for _, d := range r.Descriptors {
			got = append(got, d.Name)
		}
		if !slices.Equal(got, tc.want) || (r.Err == "") != (tc.err == "") || !strings.Contains(r.Err, tc.err) {
			t.Errorf("%d named %q: %q, %s, want %q, %s", tc.files, tc.names, got, r.Err, tc.want, tc.err)
		}
		if len(r.Leaks) != 0 {
			t.Errorf("%d named %q: a child would have %v", tc.files, tc.names, r.Leaks)
		}
	}
}

func TestNotForUs(t *testing.T) {
	null := []*os.File{open(t, os.DevNull)}
	one := listenFDs + "=1"
	for _, env := range [][]string{
		{pidEnv + "=1", one},
		{pidEnv + "=1", listenFDs + "=nonsense"}, // somebody else's nonsense
		{idEnv + "=1", one},
	} {
		if slices.Contains(env, idEnv+"=1") {
			if _, known := pidfdID(); !known {
				continue
			}
		}
		if r := service(t, null, env...); r.Err != "" || r.Descriptors != nil {
			t.Errorf("%q: %v, %s, want nothing", env, r.Descriptors, r.Err)
		}
	}
	if _, known := pidfdID(); known {
		if r := service(t, null, idEnv+"=own", one); r.Err != "" || len(r.Descriptors) != 1 {
			t.Errorf("with the process's own id: %v, %s, want one descriptor", r.Descriptors, r.Err)
		}
	}
}

// The gap after what was passed is where the runtime's own files are.
func TestWrongCount(t *testing.T) {
	null := slices.Repeat([]*os.File{open(t, os.DevNull)}, 2)
	for count, want := range map[string]string{
		"3":          "take 3 descriptors from 3 on, as LISTEN_FDS says: 5 ",
		"2147483644": ": 5 ",
		"2147483645": "not a number of descriptors",
		"-1":         `LISTEN_FDS="-1": not a number`,
		"two":        `LISTEN_FDS="two": not a number`,
		"1,":         `LISTEN_FDS="1,": not a number`,
	} {
		r := service(t, null, listenFDs+"="+count)
		if !strings.Contains(r.Err, want) || r.Descriptors != nil {
			t.Errorf("LISTEN_FDS=%s: %v, %q, want %q", count, r.Descriptors, r.Err, want)
		}
		if strings.Contains(want, ": 5") && len(r.Leaks) != 0 {
			t.Errorf("LISTEN_FDS=%s: a child would have %v", count, r.Leaks)
		}
	}
}

// In this process every descriptor was opened by itself.
func TestOwnFiles(t *testing.T) {
	self := strconv.Itoa(os.Getpid())
	unix.CloseOnExec(firstFD) // unless the test inherited it
	for _, tc := range []struct {
		env  env
		want string // of the error; empty where there is none
	}{
		{env{}, ""},
		{env{listenFDs: "1"}, ""},
		{env{listenPID: self}, ""},
		{env{listenPID: self, listenFDs: "0"}, ""},
		{env{listenPID: "x", listenFDs: "1"}, `LISTEN_PID="x": not the number of a process`},
		{env{listenPID: "0", listenFDs: "1"}, `LISTEN_PID="0"`},
		{env{listenPID: self, listenPIDFDID: "x", listenFDs: "1"}, `LISTEN_PIDFDID="x": not a number`},
		{env{listenPID: self, listenFDs: "1"}, "3 "},
	} {
		got, err := Inherited(tc.env.get, tc.env.unset)
		if got != nil || (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v, %v, want %q", got, err, tc.want)
		}
		if len(tc.env) > 0 {
			t.Errorf("still set: %v", tc.env)
		}
	}
	fails := errors.New("fails")
	e := env{listenPID: self, listenFDs: "1"}
	if got, err := Inherited(e.get, func(string) error { return fails }); got != nil || !errors.Is(err, fails) {
		t.Errorf("the variables stay: %v, %v", got, err)
	}
}
