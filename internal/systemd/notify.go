// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// socketEnv names the socket of notifications.
const socketEnv = "NOTIFY_SOCKET"

const (
	// maxDatagram is how much the manager reads of a datagram: PIPE_BUF
	// (systemd, src/core/manager.c, NOTIFY_BUFFER_MAX). It ignores longer ones.
	maxDatagram = 4096
	// maxStatus keeps a status from making a datagram too long.
	maxStatus = 1024
	// maxSocketPath is the length of sun_path less the NUL at its end.
	maxSocketPath = 107
	// defaultPatience is how long a datagram may wait for room in the queue of
	// the socket.
	defaultPatience = 5 * time.Second
)

// Notifier sends notifications to the service manager. A nil Notifier is one
// without a manager: its methods do nothing and return nil. It may be used by
// several goroutines.
type Notifier struct {
	socket   string // as in the environment
	patience time.Duration
}

// NewNotifier returns a Notifier for the socket that NOTIFY_SOCKET names, a path
// or, with a leading @, a name in the abstract namespace. When the variable
// is not set it returns nil and no error. getenv is usually os.Getenv.
func NewNotifier(getenv func(string) string) (*Notifier, error) {
	socket := getenv(socketEnv)
	if socket == "" {
		return nil, nil
	}
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("read %s=%q: %s; correct or unset the variable", socketEnv, socket, fmt.Sprintf(format, args...))
	}
	switch {
	case strings.HasPrefix(socket, "vsock"):
		return nil, wrong("sockets of a hypervisor (AF_VSOCK) are not supported, only a path or a name that begins with @")
	case socket[0] != '/' && socket[0] != '@':
		return nil, wrong("neither a path from / on nor a name that begins with @")
	case len(socket) == 1:
		return nil, wrong("the name is empty")
	case len(socket) > maxSocketPath:
		return nil, wrong("%d octets, at most %d are possible", len(socket), maxSocketPath)
	}
	return &Notifier{socket: socket, patience: defaultPatience}, nil
}

// Ready says that the service has started, or is done with reloading. An empty
// status leaves the one before as it is. See Status for its form.
func (n *Notifier) Ready(status string) error {
	lines := []string{"READY=1"}
	if status != "" {
		lines = append(lines, statusLine(status))
	}
	return n.Send(lines...)
}

// Reloading says that the service begins to reload. Ready has to follow. The time
// of this call is sent with it; a unit of Type=notify-reload needs that.
func (n *Notifier) Reloading() error {
	if n == nil {
		return nil
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("read the monotonic clock: %w", err)
	}
	return n.Send("RELOADING=1", "MONOTONIC_USEC="+strconv.FormatInt(now.Nano()/1000, 10))
}

// Stopping says that the service begins to shut down. It is for the main process
// when nobody comes after it: since systemd 259 it cannot be taken back, so
// a generation that drains stays silent.
func (n *Notifier) Stopping() error { return n.Send("STOPPING=1") }

// Status sets the text that systemctl status shows. It is made to one line of
// valid UTF-8 of at most 1024 octets.
func (n *Notifier) Status(text string) error { return n.Send(statusLine(text)) }

// MainPID says that the process is the main one of the service from now on.
// The process has to be in the cgroup of the unit. See the package's comment on
// who may say this.
func (n *Notifier) MainPID(pid int) error { return n.Send("MAINPID=" + strconv.Itoa(pid)) }

// Send sends several assignments, like "READY=1", in one datagram, which the
// manager takes as a whole. BARRIER and FDSTORE go with descriptors and
// therefore have methods of their own.
func (n *Notifier) Send(lines ...string) error {
	if n == nil {
		return nil
	}
	for _, line := range lines {
		if err := checkLine(line); err != nil {
			return n.failed(err)
		}
	}
	return n.send(lines)
}

// StoreFD gives the manager a duplicate of the descriptor, which comes back from
// Inherited by this name after the service was restarted. See StoreName for
// the name. Several may have the same name. The unit needs
// FileDescriptorStoreMax=.
//
// With poll the manager drops the entry by itself when the descriptor hangs up or
// has an error pending. That is right for the end of a connection or a pipe, and
// wrong for a UDP socket, which has an error pending whenever some client's
// host was unreachable.
func (n *Notifier) StoreFD(name string, c syscall.Conn, poll bool) error {
	if n == nil {
		return nil
	}
	lines, err := storeLines(name)
	if err != nil {
		return n.failed(err)
	}
	if !poll {
		lines = append(lines, "FDPOLL=0")
	}
	// A duplicate, so that the connection can be closed while this waits.
	fd := -1
	err = rawconn.Of(c, func(of int) (err error) {
		fd, err = unix.FcntlInt(uintptr(of), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return n.failed(fmt.Errorf("store descriptor %q: %w", name, err))
	}
	return errors.Join(n.send(lines, fd), unix.Close(fd))
}

// RemoveFD removes all descriptors of this name from the manager's store.
func (n *Notifier) RemoveFD(name string) error {
	if n == nil {
		return nil
	}
	if err := checkFDName(name); err != nil {
		return n.failed(err)
	}
	return n.send([]string{"FDSTOREREMOVE=1", "FDNAME=" + name})
}

// RenameFD stores the descriptor under another name than before. The old entry
// has to go first, or the manager would not take the new one. When the process
// dies between the two datagrams neither is stored, and the successor binds
// afresh.
func (n *Notifier) RenameFD(from, to string, c syscall.Conn, poll bool) error {
	if n == nil {
		return nil
	}
	if _, err := storeLines(to); err != nil { // before anything is removed
		return n.failed(err)
	}
	if err := n.RemoveFD(from); err != nil {
		return err
	}
	return n.StoreFD(to, c, poll)
}

// Barrier waits until the manager has handled everything that was sent before.
// It returns an error when ctx ends earlier. A manager that dies lets go of the
// barrier, too.
func (n *Notifier) Barrier(ctx context.Context) (err error) {
	if n == nil {
		return nil
	}
	if ctx.Err() != nil {
		return n.failed(fmt.Errorf("wait for the barrier: %w", context.Cause(ctx)))
	}
	// Non-blocking, so that the wait can end with ctx.
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return n.failed(fmt.Errorf("make a pipe for the barrier: %w", err))
	}
	r := os.NewFile(uintptr(p[0]), "barrier")
	defer func() { err = errors.Join(err, r.Close()) }()
	// The manager has the last copy of the other end when this returns.
	if err := errors.Join(n.send([]string{"BARRIER=1"}, p[1]), unix.Close(p[1])); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() {
		// It fails only on a closed file, which nobody waits for any more.
		_ = r.SetReadDeadline(time.Unix(1, 0))
	})
	defer stop()
	_, err = io.Copy(io.Discard, r)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return n.failed(fmt.Errorf("wait for the barrier: %w: the manager has not read what was sent; see whether it is busy or stopped", context.Cause(ctx)))
	}
	if err != nil {
		return n.failed(fmt.Errorf("wait for the barrier: %w", err))
	}
	return nil
}

// send sends one datagram, with duplicates of fds.
func (n *Notifier) send(lines []string, fds ...int) error {
	state := strings.Join(lines, "\n")
	switch {
	case state == "":
		return n.failed(errors.New("nothing to send"))
	case len(state) > maxDatagram:
		return n.failed(fmt.Errorf("the message has %d octets, the manager reads %d; send it in parts", len(state), maxDatagram))
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	// A socket for each datagram: none is left over for a child to inherit,
	// and none is connected to a manager that executed itself since.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.socket, Net: "unixgram"})
	if err != nil {
		return n.failed(err)
	}
	if err := write(conn, []byte(state), rights, time.Now().Add(n.patience)); err != nil {
		return n.failed(errors.Join(fmt.Errorf("send: %w", err), conn.Close()))
	}
	return conn.Close()
}

// write sends a datagram, and waits for room in the receiver's queue until the
// deadline. net.UnixConn does not send descriptors on a connected socket, and
// one that is not connected would not wait. The kernel adds the credentials, by
// which the manager knows the sender.
func write(conn *net.UnixConn, data, rights []byte, deadline time.Time) error {
	if err := conn.SetWriteDeadline(deadline); err != nil {
		return err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Write(func(fd uintptr) (done bool) {
		for {
			failed = unix.Sendmsg(int(fd), data, rights, nil, unix.MSG_NOSIGNAL)
			if failed != unix.EINTR {
				return failed != unix.EAGAIN
			}
		}
	})
	if err != nil {
		return err
	}
	return failed
}

// failed says of which socket an error is and, where the user can act, how.
func (n *Notifier) failed(err error) error {
	hint := ""
	switch {
	case errors.Is(err, fs.ErrNotExist):
		hint = "; is the path visible here (RootDirectory=, chroot, container)?"
	case errors.Is(err, unix.ECONNREFUSED):
		hint = "; nobody reads the socket any more: is " + socketEnv + " left over from another service?"
	case errors.Is(err, fs.ErrPermission):
		hint = "; may this user, after sandboxing, write to the socket?"
	case errors.Is(err, unix.EPROTOTYPE):
		hint = "; it has to be a datagram socket"
	case errors.Is(err, os.ErrDeadlineExceeded):
		hint = fmt.Sprintf("; its queue was full for %v: is the manager busy or stopped?", n.patience)
	case errors.Is(err, unix.ETOOMANYREFS):
		hint = "; too many descriptors are on their way: raise LimitNOFILE= or send fewer at once"
	}
	return fmt.Errorf("notify the service manager at %s: %w%s", n.socket, err, hint)
}

// checkLine refuses what is no assignment, or would be several.
func checkLine(line string) error {
	variable, _, ok := strings.Cut(line, "=")
	switch {
	case !ok || variable == "":
		return fmt.Errorf("send %q: not of the form NAME=value", line)
	case strings.ContainsAny(line, "\n\x00"):
		return fmt.Errorf("send %q: a value has one line and no NUL", line)
	case variable == "BARRIER" || variable == "FDSTORE":
		return fmt.Errorf("send %q: it goes with a descriptor; use its method", line)
	}
	if variable == "MAINPID" {
		if pid, err := strconv.Atoi(line[len("MAINPID="):]); err != nil || pid <= 0 {
			return fmt.Errorf("send %q: not the number of a process", line)
		}
	}
	return nil
}

// statusLine makes the assignment of a text: one line, because the next one
// would be another assignment, and UTF-8, because the manager refuses others.
func statusLine(text string) string {
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r // utf8.RuneError for each octet that is not UTF-8
	}, text)
	if len(text) > maxStatus {
		end := maxStatus
		for !utf8.RuneStart(text[end]) {
			end--
		}
		text = text[:end]
	}
	return "STATUS=" + text
}
