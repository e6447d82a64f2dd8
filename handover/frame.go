// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
)

// The protocol's versions that this build speaks, lowest and highest.
const (
	minVersion = 1
	maxVersion = 1
)

// A frame is one packet of a SOCK_SEQPACKET connection: a header of eight
// octets and the payload. docs/handover-protocol.md describes all.
//
//	 0               4         6         8
//	+---------------+---------+---------+----------
//	| length        | type    | flags   | payload
//	+---------------+---------+---------+----------
//
// Numbers are big endian; length is the payload's.
type frame struct {
	kind    frameType
	flags   uint16
	payload []byte
	fds     []int // owned by whoever holds the frame
}

const (
	headerLen = 8
	// maxPayload keeps a frame below the default send buffer of a Unix socket.
	maxPayload = 64 << 10
	// maxFrameFDs is the most descriptors in one frame. The kernel's limit is
	// SCM_MAX_FD, 253 (include/net/scm.h).
	maxFrameFDs = 64
)

// flagMustUnderstand makes a receiver that does not know the type give up
// instead of skipping the frame.
const flagMustUnderstand = 1

type frameType uint16

// Types 1 to 0x7f are of the handover, from 0x80 on of the control.
const (
	frameHello     frameType = 1  // both: who speaks
	frameRefuse    frameType = 2  // both: it ends here, and why
	frameManifest  frameType = 3  // predecessor: descriptors
	frameAccepted  frameType = 4  // successor: has all of the manifest
	frameState     frameType = 5  // predecessor: a piece of the state
	frameStateEnd  frameType = 6  // predecessor: length and checksum
	frameReady     frameType = 7  // successor: the application is ready
	frameCommit    frameType = 8  // predecessor: accepts nothing any more
	frameCommitted frameType = 9  // successor: serves
	framePing      frameType = 10 // predecessor: still there?
	framePong      frameType = 11 // successor: yes
	frameRollback  frameType = 12 // predecessor: serves again, leave
	frameFinal     frameType = 13 // predecessor: will not take back any more

	frameRequest frameType = 0x80 // client: a control request
	frameResult  frameType = 0x81 // process: its result
)

var frameNames = map[frameType]string{
	frameHello: "HELLO", frameRefuse: "REFUSE", frameManifest: "MANIFEST", frameAccepted: "ACCEPTED",
	frameState: "STATE", frameStateEnd: "STATE-END", frameReady: "READY", frameCommit: "COMMIT",
	frameCommitted: "COMMITTED", framePing: "PING", framePong: "PONG", frameRollback: "ROLLBACK",
	frameFinal: "FINAL", frameRequest: "REQUEST", frameResult: "RESULT",
}

func (t frameType) String() string {
	if name, ok := frameNames[t]; ok {
		return name
	}
	return fmt.Sprintf("frame type %#x", uint16(t))
}

// appendFrame appends the header and the payload.
func appendFrame(b []byte, f frame) ([]byte, error) {
	if len(f.payload) > maxPayload {
		return b, fmt.Errorf("write %v: %d bytes, at most %d fit in a frame", f.kind, len(f.payload), maxPayload)
	}
	b = binary.BigEndian.AppendUint32(b, uint32(len(f.payload)))
	b = binary.BigEndian.AppendUint16(b, uint16(f.kind))
	b = binary.BigEndian.AppendUint16(b, f.flags)
	return append(b, f.payload...), nil
}

// parseFrame reads a packet. The payload is a part of b.
func parseFrame(b []byte) (frame, error) {
	if len(b) < headerLen {
		return frame{}, fmt.Errorf("%w: %d bytes, shorter than a header", ErrProtocol, len(b))
	}
	f := frame{kind: frameType(binary.BigEndian.Uint16(b[4:])), flags: binary.BigEndian.Uint16(b[6:]), payload: b[headerLen:]}
	if n := binary.BigEndian.Uint32(b); n > maxPayload || int(n) != len(f.payload) {
		return frame{}, fmt.Errorf("%w: %v says %d bytes and has %d", ErrProtocol, f.kind, n, len(f.payload))
	}
	if _, known := frameNames[f.kind]; !known && f.flags&flagMustUnderstand != 0 {
		return frame{}, fmt.Errorf("%w: %v has to be understood and is not known here; upgrade this program first", ErrProtocol, f.kind)
	}
	return f, nil
}

// The payloads are JSON objects, except that of STATE. Fields that are not
// known are skipped, so a version may add some.

// hello is the first frame of each side.
type hello struct {
	// MinVersion and MaxVersion are what the successor speaks; the predecessor
	// answers with the one version it chose in both.
	MinVersion int    `json:"min_version"`
	MaxVersion int    `json:"max_version"`
	Name       string `json:"name"`
	Build      string `json:"build"`
	PID        int    `json:"pid"`
	// Generation is the predecessor's number. The successor's is one more.
	Generation int `json:"generation,omitempty"`
	// State says that STATE frames follow the manifest.
	State bool `json:"state,omitempty"`
	// Probation is how long the predecessor may still take back, in
	// milliseconds.
	Probation int64 `json:"probation_ms,omitempty"`
}

// refusal ends a handover or a control request.
type refusal struct {
	Code   string `json:"code"`
	Reason string `json:"reason"`
}

// manifest is one MANIFEST frame. Its entries are in the order of the frame's
// descriptors.
type manifest struct {
	Entries []entry `json:"entries"`
	Last    bool    `json:"last,omitempty"`
}

// entry describes one descriptor.
type entry struct {
	Role roleName `json:"role"`
	Name string   `json:"name"`
	// Network and Address are of sockets: "tcp", "udp", "unix", "unixgram",
	// "unixpacket", and the local address.
	Network string `json:"network,omitempty"`
	Asked   string `json:"asked,omitempty"` // the address that the program gave
	Address string `json:"address,omitempty"`
	// Borrowed is a Unix socket whose path somebody else removes: the service
	// manager, or the application.
	Borrowed bool `json:"borrowed,omitempty"`
	// Cookie is the socket's SO_COOKIE. Both sides have to see the same.
	Cookie uint64 `json:"cookie,omitempty"`
	// Of a lifeline: the process that holds its other end.
	Generation int    `json:"generation,omitempty"`
	PID        int    `json:"pid,omitempty"`
	Build      string `json:"build,omitempty"`
}

// roleName says what a descriptor is for.
type roleName string

const (
	roleListener roleName = "listener" // a stream socket that listens
	rolePacket   roleName = "packet"   // a datagram socket
	roleConn     roleName = "conn"     // any other socket
	roleFile     roleName = "file"
	roleControl  roleName = "control"  // the listener of the control socket
	roleLifeline roleName = "lifeline" // tells that an older generation is alive
)

// stateEnd closes the state.
type stateEnd struct {
	Length int64  `json:"length"`
	CRC32C uint32 `json:"crc32c"`
	// Error says why the predecessor could not write its state.
	Error string `json:"error,omitempty"`
}

// final ends the probation. Without anything to say it has no payload.
type final struct {
	// Reload says that the service manager asked the predecessor for a reload
	// when it had named the successor already. The successor answers.
	Reload bool `json:"reload,omitempty"`
}

// request is a control request.
type request struct {
	Do string `json:"do"` // "upgrade" or "status"
}

// result answers a request. It is also what comes in pieces: an upgrade's
// result comes when it has ended.
type result struct {
	Error string  `json:"error,omitempty"`
	Code  string  `json:"code,omitempty"`
	Now   *Status `json:"status,omitempty"`
}

// decode reads a payload.
func decode[T any](f frame) (T, error) {
	var v T
	if err := json.Unmarshal(f.payload, &v); err != nil {
		return v, fmt.Errorf("%w: read %v: %w", ErrProtocol, f.kind, err)
	}
	return v, nil
}
