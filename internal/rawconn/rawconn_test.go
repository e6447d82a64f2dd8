// SPDX-License-Identifier: Apache-2.0

package rawconn

import (
	"errors"
	"net"
	"testing"
)

func TestErrors(t *testing.T) {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	reason := errors.New("reason")
	called := 0
	f := func(fd int) error {
		called++
		if fd < 3 {
			t.Errorf("descriptor %d", fd)
		}
		return reason
	}
	if err := Of(c, f); !errors.Is(err, reason) {
		t.Errorf("f's error: %v", err)
	}
	if err := Of(c, func(int) error { return nil }); err != nil {
		t.Errorf("no error: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Of(c, f); !errors.Is(err, net.ErrClosed) || called != 1 {
		t.Errorf("on a closed connection: %v, f was called %d times", err, called)
	}
}
