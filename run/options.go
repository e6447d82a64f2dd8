// SPDX-License-Identifier: Apache-2.0

package run

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"instar/dispatch"
)

// Defaults of Options.
const (
	DefaultReadyTimeout = time.Minute
	DefaultProbation    = 5 * time.Second
	DefaultDrain        = 30 * time.Second
	DefaultMaxProcesses = 8
)

// ErrOptions means that an option has a value that makes no sense.
var ErrOptions = errors.New("invalid options")

// Options configure a Supervisor.
type Options struct {
	// Command is the server and its arguments. A name without a slash is looked up in PATH
	// at each start. Required.
	Command []string
	// Launcher is how this program is started to become the server: its file, the name that
	// it gets as its zeroth argument, and its first arguments. It has to call Launch with the
	// arguments that follow. Required.
	Launcher []string
	// Listen are the sockets that the server gets, in this order from descriptor 3 on.
	Listen []Listener
	// User is who the server runs as. Default: the user of this process, with its
	// capabilities. Another one gets none.
	User *User
	// NonBlocking passes non-blocking sockets, for servers that expect that
	// (NonBlocking= of a systemd unit). Default false.
	NonBlocking bool
	// NoNotify is for servers that never say READY=1: they count as ready as soon as they
	// are executed. Connections wait at the listeners until they are. Default false.
	NoNotify bool

	// ReadyTimeout is how long a start may take until READY=1. Default 1 min.
	ReadyTimeout time.Duration
	// Probation is how long the predecessor goes on beside a ready successor, and serves
	// alone again if that one ends. Default 5 s; negative for none.
	Probation time.Duration
	// Drain is how long UDP flows keep a predecessor, and then, from SIGTERM on, how long
	// a process may take to end. Default 30 s.
	Drain time.Duration
	// MaxProcesses is how many processes of the server may live at once. Default 8, at
	// least 2.
	MaxProcesses int

	// Watch upgrades when the server's executable is another file than before. A file has
	// to look the same for a second, so that one which is being written is let alone; one
	// that fails is tried again only once it has changed. Default false.
	Watch bool

	// Root is the bpffs folder of UDP groups. Default dispatch.DefaultRoot.
	Root string
	// Service is the name under which UDP groups are joined, and that of status answers.
	// Default: the base name of Command[0].
	Service string

	// Control is the path of a Unix socket ("@name" is abstract) at which "instar upgrade"
	// and "instar status" work, once the first process is ready. It is made with mode 0600.
	// Default: none.
	Control string
	// AllowUIDs are users that may use Control, besides root and the effective user of this
	// process.
	AllowUIDs []int

	// Stdout and Stderr are the server's. Default: those of this process.
	Stdout, Stderr *os.File
	// Logger gets what happens. Default: nothing is logged.
	Logger *slog.Logger
}

// User is a user without supplementary groups.
type User struct {
	UID, GID int
	// Name and Home become USER, LOGNAME and HOME of the server. Default: they stay as
	// they are.
	Name, Home string
}

// Listener is one socket, or several UDP workers of one name.
type Listener struct {
	// Name is what the server finds in LISTEN_FDNAMES.
	Name string
	// Network is tcp, tcp4, tcp6, unix, udp, udp4 or udp6.
	Network string
	// Address is "IP:port", ":port", or the path of a Unix socket ("@name" is abstract).
	// UDP ports have to be given, TCP port 0 is any free one.
	Address string
	// Steering of a UDP group: stateless or flow. Required with UDP.
	Steering dispatch.Steering
	// Workers is how many UDP sockets the server gets. Default 1.
	Workers int
	// ReceiveBuffer is SO_RCVBUF of UDP sockets in bytes. Default: the kernel's.
	ReceiveBuffer int
	// FlowTimeout ends silent flows of steering flow. Default dispatch.DefaultFlowTimeout.
	FlowTimeout time.Duration
}

// ParseListener reads NAME=NETWORK:ADDRESS[,KEY=VALUE...], such as web=tcp:127.0.0.1:80,
// admin=unix:/run/admin.sock or echo=udp::7,steering=flow. The keys, of UDP alone, are
// steering, workers, rcvbuf (bytes) and flow-timeout (a duration).
func ParseListener(s string) (Listener, error) {
	wrong := func(format string, args ...any) (Listener, error) {
		return Listener{}, fmt.Errorf("%w: listener %q: %s", ErrOptions, s, fmt.Sprintf(format, args...))
	}
	spec, options, _ := strings.Cut(s, ",")
	name, where, ok := strings.Cut(spec, "=")
	network, address, ok2 := strings.Cut(where, ":")
	if !ok || !ok2 {
		return wrong("write NAME=tcp:IP:PORT, NAME=udp:IP:PORT,steering=KIND or NAME=unix:PATH")
	}
	l := Listener{Name: name, Network: network, Address: address}
	for _, option := range strings.FieldsFunc(options, func(r rune) bool { return r == ',' }) {
		key, value, _ := strings.Cut(option, "=")
		if !l.isUDP() {
			return wrong("%s is for UDP alone", key)
		}
		var err error
		switch key {
		case "steering":
			l.Steering, err = dispatch.ParseSteering(value)
		case "workers":
			l.Workers, err = strconv.Atoi(value)
		case "rcvbuf":
			l.ReceiveBuffer, err = strconv.Atoi(value)
		case "flow-timeout":
			l.FlowTimeout, err = time.ParseDuration(value)
		default:
			return wrong("unknown %q; known are steering, workers, rcvbuf and flow-timeout", key)
		}
		if err != nil {
			return wrong("%s: %v", key, err)
		}
		if key == "steering" && l.Steering != dispatch.SteeringStateless && l.Steering != dispatch.SteeringFlow {
			return wrong("%s", wrongSteering(value))
		}
	}
	if l.isUDP() && !strings.Contains(","+options, ",steering=") {
		return wrong("%s", wrongSteering("none"))
	}
	if err := l.check(); err != nil {
		return Listener{}, err
	}
	return l, nil
}

func wrongSteering(which string) string {
	return fmt.Sprintf("steering %s: write steering=stateless (each packet stands for itself, as with DNS) or steering=flow "+
		"(a sender stays with its process); others need a server that uses package dispatch", which)
}

func (l Listener) isUDP() bool {
	return l.Network == "udp" || l.Network == "udp4" || l.Network == "udp6"
}

func (l Listener) check() error {
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("%w: listener %q: %s", ErrOptions, l.Name, fmt.Sprintf(format, args...))
	}
	if l.Name == "" || len(l.Name) > 255 || strings.ContainsFunc(l.Name, func(r rune) bool { return r <= ' ' || r > '~' || r == ':' }) {
		return wrong("a name has 1 to 255 printable ASCII characters, without colon")
	}
	switch l.Network {
	case "tcp", "tcp4", "tcp6", "udp", "udp4", "udp6":
		if _, _, err := net.SplitHostPort(l.Address); err != nil {
			return wrong("%v", err)
		}
	case "unix":
		if l.Address == "" {
			return wrong("a Unix socket needs a path")
		}
	default:
		return wrong("unknown network %q; known are tcp, tcp4, tcp6, udp, udp4, udp6 and unix", l.Network)
	}
	if l.isUDP() && l.Steering != dispatch.SteeringStateless && l.Steering != dispatch.SteeringFlow {
		return wrong("%s", wrongSteering(l.Steering.String()))
	}
	if l.Workers < 0 || l.ReceiveBuffer < 0 || l.FlowTimeout < 0 {
		return wrong("numbers must not be negative")
	}
	return nil
}

func (o *Options) setDefaults() error {
	if len(o.Command) == 0 || o.Command[0] == "" {
		return fmt.Errorf("%w: no server to run", ErrOptions)
	}
	if len(o.Launcher) < 2 {
		return fmt.Errorf("%w: no launcher", ErrOptions)
	}
	names := map[string]bool{}
	for _, l := range o.Listen {
		if err := l.check(); err != nil {
			return err
		}
		if names[l.Name] {
			return fmt.Errorf("%w: two listeners are named %q", ErrOptions, l.Name)
		}
		names[l.Name] = true
	}
	if o.User != nil && os.Geteuid() != 0 && (o.User.UID != os.Geteuid() || o.User.GID != os.Getegid()) {
		return fmt.Errorf("%w: only root can run the server as another user", ErrOptions)
	}
	if o.ReadyTimeout < 0 || o.Drain < 0 {
		return fmt.Errorf("%w: times must not be negative", ErrOptions)
	}
	if o.ReadyTimeout == 0 {
		o.ReadyTimeout = DefaultReadyTimeout
	}
	if o.Probation == 0 {
		o.Probation = DefaultProbation
	}
	if o.Drain == 0 {
		o.Drain = DefaultDrain
	}
	if o.MaxProcesses == 0 {
		o.MaxProcesses = DefaultMaxProcesses
	}
	if o.MaxProcesses < 2 {
		return fmt.Errorf("%w: %d processes, an upgrade needs 2", ErrOptions, o.MaxProcesses)
	}
	if o.Service == "" {
		o.Service = o.Command[0][strings.LastIndexByte(o.Command[0], '/')+1:]
	}
	if o.Stdout == nil {
		o.Stdout = os.Stdout
	}
	if o.Stderr == nil {
		o.Stderr = os.Stderr
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}
