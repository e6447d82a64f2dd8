// SPDX-License-Identifier: Apache-2.0

// Package sockdiag wraps NETLINK_SOCK_DIAG (sock_diag(7)): which UDP sockets and TCP
// listeners of the current network namespace have a port, and who they belong to.
//
// It needs no capability. It needs Linux 4.2 for INET_DIAG_SKV6ONLY; the
// kernel's modules udp_diag and tcp_diag are loaded on demand.
package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Socket is a socket as the kernel describes it.
type Socket struct {
	// Family is unix.AF_INET or unix.AF_INET6.
	Family int
	// Local is the address that the socket is bound to. IPv4 addresses are IPv4
	// where the family is, and IPv4-mapped where an IPv6 socket is bound to one.
	Local netip.AddrPort
	// Peer is valid when the socket is connected.
	Peer netip.AddrPort
	// V6Only is IPV6_V6ONLY. The kernel sets it when a socket is bound to a
	// specific IPv6 address that is not IPv4-mapped. It does not tell it of
	// connected sockets, where it is false here.
	V6Only bool
	// Device is the index of the device that the socket is bound to
	// (SO_BINDTODEVICE), 0 when it is bound to none.
	Device int
	// UID is the user that made the socket (fchown changes it), as the caller's
	// user namespace sees it.
	UID uint32
	// Inode names the socket in /proc/PID/fd.
	Inode uint32
	// Cookie names the socket in the kernel until it restarts (SO_COOKIE).
	Cookie uint64
}

// Sizes and offsets of struct inet_diag_req_v2 and inet_diag_msg
// (linux/inet_diag.h).
const (
	sizeofRequest = 8 + sizeofID
	sizeofMessage = 4 + sizeofID + 20
	sizeofID      = 48

	attrV6Only = 11 // INET_DIAG_SKV6ONLY
	tcpListen  = 10 // TCP_LISTEN
)

// request is struct inet_diag_req_v2.
type request struct {
	family, protocol uint8
	// states is a mask of 1 << state (net/tcp_states.h).
	states uint32
	port   uint16
}

func (r request) Len() int { return sizeofRequest }

func (r request) Serialize() []byte {
	b := make([]byte, 0, sizeofRequest)
	b = append(b, r.family, r.protocol, 0 /* extensions */, 0)
	b = binary.NativeEndian.AppendUint32(b, r.states)
	b = binary.BigEndian.AppendUint16(b, r.port)
	return b[:sizeofRequest] // any peer, address, device and cookie
}

// UDP lists the sockets of the network namespace of the calling thread, IPv4
// and IPv6, that are bound to the port; port 0 stands for all.
//
// The kernel does not give a snapshot: what is bound or closed during the call
// may or may not be listed.
func UDP(port uint16) ([]Socket, error) {
	return dump("UDP sockets", "udp_diag", request{protocol: unix.IPPROTO_UDP, states: ^uint32(0), port: port})
}

// TCPListeners lists the TCP sockets that listen on the port, as UDP does. An MPTCP
// listener has one in it, which is listed.
func TCPListeners(port uint16) ([]Socket, error) {
	return dump("TCP listeners", "tcp_diag", request{protocol: unix.IPPROTO_TCP, states: 1 << tcpListen, port: port})
}

func dump(what, module string, r request) ([]Socket, error) {
	var sockets []Socket
	seen := make(map[uint64]bool)
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		r.family = family
		req.AddData(r)
		messages, err := req.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
		if errors.Is(err, unix.ENOENT) {
			return nil, fmt.Errorf("list %s: %w: load the kernel module %s (%w)", what, errors.ErrUnsupported, module, err)
		}
		if err != nil && !errors.Is(err, nl.ErrDumpInterrupted) {
			return nil, fmt.Errorf("list %s: %w", what, err)
		}
		for _, m := range messages {
			s, err := parse(m)
			if err != nil {
				return nil, fmt.Errorf("list %s: %w", what, err)
			}
			// The kernel goes through its table in steps. What moves there
			// meanwhile can come twice.
			if (r.port == 0 || s.Local.Port() == r.port) && s.Local.Port() != 0 && !seen[s.Cookie] {
				seen[s.Cookie] = true
				sockets = append(sockets, s)
			}
		}
	}
	return sockets, nil
}

// parse reads struct inet_diag_msg and the attributes that follow it.
func parse(b []byte) (Socket, error) {
	if len(b) < sizeofMessage {
		return Socket{}, fmt.Errorf("parse socket: %d bytes, want %d", len(b), sizeofMessage)
	}
	id, rest := b[4:4+sizeofID], b[4+sizeofID:sizeofMessage]
	s := Socket{
		Family: int(b[0]),
		Device: int(binary.NativeEndian.Uint32(id[36:])),
		// The cookie is two words, the lower half first (sock_diag_save_cookie).
		Cookie: uint64(binary.NativeEndian.Uint32(id[40:])) | uint64(binary.NativeEndian.Uint32(id[44:]))<<32,
		UID:    binary.NativeEndian.Uint32(rest[12:]),
		Inode:  binary.NativeEndian.Uint32(rest[16:]),
	}
	address := func(b []byte) netip.Addr {
		if s.Family == unix.AF_INET6 {
			return netip.AddrFrom16([16]byte(b[:16]))
		}
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	if s.Family != unix.AF_INET && s.Family != unix.AF_INET6 {
		return Socket{}, fmt.Errorf("parse socket: family %d", s.Family)
	}
	s.Local = netip.AddrPortFrom(address(id[4:]), binary.BigEndian.Uint16(id[0:]))
	if peer := binary.BigEndian.Uint16(id[2:]); peer != 0 {
		s.Peer = netip.AddrPortFrom(address(id[20:]), peer)
	}
	// Attributes are length, type, value, and padding to a multiple of four,
	// which the last one may lack.
	for a := b[sizeofMessage:]; len(a) >= 4; {
		length := int(binary.NativeEndian.Uint16(a))
		if length < 4 || length > len(a) {
			return Socket{}, fmt.Errorf("parse socket: attribute of %d bytes in %d", length, len(a))
		}
		if binary.NativeEndian.Uint16(a[2:]) == attrV6Only && length > 4 {
			s.V6Only = a[4] != 0
		}
		a = a[min((length+3)&^3, len(a)):]
	}
	return s, nil
}

// Process is a process that has a descriptor of a socket.
type Process struct {
	PID     int
	Command string // as in /proc/PID/comm
}

func (p Process) String() string { return fmt.Sprintf("%s (pid %d)", p.Command, p.PID) }

// Owners finds the processes that hold the sockets with the given inodes, in
// the order of their PIDs. Processes that the caller may not look into
// (another user's, without CAP_SYS_PTRACE), that are in another PID namespace,
// or that end meanwhile are left out.
//
// It reads all descriptors of all processes: it is for the text of an error.
func Owners(inodes ...uint32) map[uint32][]Process {
	wanted := make(map[string]uint32, len(inodes))
	for _, inode := range inodes {
		wanted[fmt.Sprintf("socket:[%d]", inode)] = inode
	}
	owners := make(map[uint32][]Process)
	if len(wanted) == 0 {
		return owners
	}
	processes, err := pids()
	if err != nil {
		return owners
	}
	for _, pid := range processes {
		dir := filepath.Join("/proc", strconv.Itoa(pid))
		descriptors, err := os.ReadDir(filepath.Join(dir, "fd"))
		if err != nil {
			continue
		}
		found := make(map[uint32]bool)
		for _, d := range descriptors {
			target, err := os.Readlink(filepath.Join(dir, "fd", d.Name()))
			if err != nil {
				continue
			}
			if inode, ok := wanted[target]; ok && !found[inode] {
				found[inode] = true
				owners[inode] = append(owners[inode], Process{pid, command(dir)})
			}
		}
	}
	return owners
}

func command(dir string) string {
	comm, err := os.ReadFile(filepath.Join(dir, "comm"))
	if err != nil {
		return "?"
	}
	return strings.TrimSuffix(string(comm), "\n")
}

// Descriptor is a descriptor that a process has of a socket.
type Descriptor struct {
	Process
	FD int
}

// Descriptors finds who holds which socket: one descriptor of each process that has the
// socket with that inode, in the order of the PIDs. What it leaves out is as in Owners.
// unseen counts the processes that the caller may not look into.
func Descriptors() (holders map[uint32][]Descriptor, unseen int, err error) {
	processes, err := pids()
	if err != nil {
		return nil, 0, err
	}
	holders = make(map[uint32][]Descriptor)
	for _, pid := range processes {
		dir := filepath.Join("/proc", strconv.Itoa(pid))
		descriptors, err := os.ReadDir(filepath.Join(dir, "fd"))
		if errors.Is(err, fs.ErrPermission) {
			unseen++
		}
		if err != nil {
			continue // it is gone
		}
		found := make(map[uint32]bool)
		for _, d := range descriptors {
			target, err := os.Readlink(filepath.Join(dir, "fd", d.Name()))
			if err != nil {
				continue
			}
			var inode uint32
			if n, _ := fmt.Sscanf(target, "socket:[%d]", &inode); n != 1 || found[inode] {
				continue
			}
			found[inode] = true
			fd, err := strconv.Atoi(d.Name())
			if err == nil {
				holders[inode] = append(holders[inode], Descriptor{Process{pid, command(dir)}, fd})
			}
		}
	}
	return holders, unseen, nil
}

// pids lists the processes of /proc.
func pids() ([]int, error) {
	processes, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var list []int
	for _, p := range processes {
		if pid, err := strconv.Atoi(p.Name()); err == nil {
			list = append(list, pid)
		}
	}
	slices.Sort(list)
	return list, nil
}

// UnixListener is a Unix socket that listens.
type UnixListener struct {
	Inode uint32
	// Path is empty when the socket has no name, and begins with "@" when its name is
	// abstract.
	Path string
}

// UnixListeners lists those of the network namespace of the calling thread.
func UnixListeners() ([]UnixListener, error) {
	// Num RefCount Protocol Flags Type St Inode Path
	table, err := os.ReadFile("/proc/thread-self/net/unix")
	if err != nil {
		return nil, fmt.Errorf("list Unix sockets: %w", err)
	}
	const listens = 1 << 16 // __SO_ACCEPTCON of linux/net.h
	var list []UnixListener
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if len(fields) < 7 {
			continue
		}
		flags, err := strconv.ParseUint(fields[3], 16, 32)
		inode, ierr := strconv.ParseUint(fields[6], 10, 32)
		if err != nil || ierr != nil || flags&listens == 0 {
			continue // the heading
		}
		l := UnixListener{Inode: uint32(inode)}
		if len(fields) > 7 {
			l.Path = fields[7]
		}
		list = append(list, l)
	}
	return list, nil
}
