// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"reflect"
	"sync"
	"unsafe"

	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tai64n"
)

// A device refuses an initiation whose timestamp is not later than that of the last one of
// the peer, so that nobody repeats an old one and makes answers go to another address. A
// device that begins anew has forgotten the timestamps; the WireGuard paper (section 5.1)
// permits it, since after a restart there is no session that could be disturbed. After an
// upgrade there is. wireguard-go lets nobody read or set them, so this reaches into it, and
// does nothing where it looks different from what it knows.

// greatest points to the timestamp of the last initiation that a device accepted from the
// peer, and to what guards it; nil when this is not to be found.
func greatest(p *device.Peer) (*tai64n.Timestamp, *sync.RWMutex) {
	handshake := reflect.ValueOf(p).Elem().FieldByName("handshake")
	if handshake.Kind() != reflect.Struct {
		return nil, nil
	}
	timestamp, mutex := handshake.FieldByName("lastTimestamp"), handshake.FieldByName("mutex")
	if !timestamp.IsValid() || timestamp.Type() != reflect.TypeFor[tai64n.Timestamp]() ||
		!mutex.IsValid() || mutex.Type() != reflect.TypeFor[sync.RWMutex]() {
		return nil, nil
	}
	return (*tai64n.Timestamp)(unsafe.Pointer(timestamp.UnsafeAddr())), (*sync.RWMutex)(unsafe.Pointer(mutex.UnsafeAddr()))
}

// timestampOf is the timestamp of the last initiation of the peer; zero for none.
func timestampOf(p *device.Peer) tai64n.Timestamp {
	timestamp, mutex := greatest(p)
	if timestamp == nil {
		return tai64n.Timestamp{}
	}
	mutex.RLock()
	defer mutex.RUnlock()
	return *timestamp
}

// refuseUntil makes the device refuse initiations that are not later.
func refuseUntil(p *device.Peer, last tai64n.Timestamp) {
	timestamp, mutex := greatest(p)
	if timestamp == nil {
		return
	}
	mutex.Lock()
	defer mutex.Unlock()
	if last.After(*timestamp) {
		*timestamp = last
	}
}
